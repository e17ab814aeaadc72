"""Text to tokens and back, and chat messages to a prompt. Knows no model, no request and no sampling."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """A model's tokenizer.

    Attributes:
        vocab_size: token ids are below this.
        eos_token_ids: any of these ends a sequence.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that this token adds to the text (a special token: its name in UTF-8)."""
        ...

    def is_special(self, token: int) -> bool: ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt text of a conversation, by the model's chat template, in a sandbox.

        Raises:
            RequestError: the template refuses the messages, or the model has none.
        """
        ...
