"""Text to tokens and back, and chat messages to a prompt. Knows no model, no request and no sampling."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from squall.errors import ModelError, RequestError
from squall.live.engine.chat import ChatTemplate, without_template
from squall.live.engine.jsonfile import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


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

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises RequestError where the text holds a token that the model does not know."""
        ...

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that this token adds to the text (a special token: its name in UTF-8); none where a model has more tokens."""
        ...

    def is_special(self, token: int) -> bool: ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt text of a conversation, by the model's chat template, in a sandbox.

        Raises:
            RequestError: the template refuses the messages, or the model has none.
        """
        ...


class HfTokenizer:
    """The tokenizer of a checkpoint directory: tokenizer.json, its special tokens and its chat template.

    Args:
        folder: holds tokenizer.json; config.json, generation_config.json, tokenizer_config.json and chat_template.jinja are
            read where they are there.

    Raises:
        ModelError: a file is missing or unreadable.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Backend

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{path}: missing; a checkpoint needs a tokenizer.json")
        try:
            self._backend: Backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path}: not a readable tokenizer ({error})") from None
        self._backend.no_padding()
        self._backend.no_truncation()
        config = read_json(folder / "config.json", {})
        settings = read_json(folder / "tokenizer_config.json", {})
        self._specials = {role: content for role in _ROLES if (content := _content(settings.get(role))) is not None}
        self._template = _chat_template(folder, settings, self._specials)
        self._vocab_size = int(config.get("vocab_size") or self._backend.get_vocab_size())
        self._eos_token_ids = self._find_eos(folder, config)
        added = self._backend.get_added_tokens_decoder()
        self._added = {id: token.content.encode() for id, token in added.items()}
        self._special_ids = frozenset(id for id, token in added.items() if token.special)
        self._to_bytes = _byte_level if _is_byte_level(self._backend) else _byte_fallback
        self._pieces: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos_token_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokens: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if tokens and max(tokens) >= self._vocab_size:  # tokens were added to the tokenizer but not to the model
            name = self._backend.id_to_token(max(tokens))
            raise RequestError(f"the text holds {name!r}, a token that this model has no embedding for", param="prompt")
        return tokens

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._backend.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token: int) -> bytes:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._added.get(token)
            if piece is None:
                name = self._backend.id_to_token(token)
                piece = b"" if name is None else self._to_bytes(name)
            self._pieces[token] = piece
        return piece

    def is_special(self, token: int) -> bool:
        return token in self._special_ids

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        if self._template is None:
            without_template()
        return self._template.render(messages, add_generation_prompt, variables)

    def _find_eos(self, folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
        """generation_config.json knows best (a chat model has several), then config.json; the tokenizer's own always counts."""
        generation = read_json(folder / "generation_config.json", {})
        given = generation.get("eos_token_id", config.get("eos_token_id"))
        several = given if isinstance(given, list) else [] if given is None else [given]
        if not all(isinstance(id, int) for id in several):
            raise ModelError(f"{folder}: eos_token_id is {given!r}; it must be a token id or a list of them")
        ids = set(several)
        if (name := self._specials.get("eos_token")) is not None and (id := self._backend.token_to_id(name)) is not None:
            ids.add(id)
        return frozenset(ids)


class ByteTokenizer:
    """One token a byte of UTF-8, and two more: `<|begin|>` before a text and `<|end|>` after it. Needs no checkpoint."""

    BEGIN, END = 256, 257

    @property
    def vocab_size(self) -> int:
        return 258

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset((self.END,))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [self.BEGIN, *text.encode()] if add_special_tokens else list(text.encode())

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        pieces = (self.token_bytes(token) for token in tokens if not (skip_special_tokens and self.is_special(token)))
        return b"".join(pieces).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes((token,)) if token < self.BEGIN else {self.BEGIN: b"<|begin|>", self.END: b"<|end|>"}.get(token, b"")

    def is_special(self, token: int) -> bool:
        return token >= self.BEGIN

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        return _PLAIN_CHAT.render(messages, add_generation_prompt, variables)


_PLAIN_CHAT = ChatTemplate(
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    {},
    "the byte tokenizer",
)
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def _content(value: Any) -> str | None:
    """A special token is written as a string or as an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _chat_template(folder: Path, settings: Mapping[str, Any], specials: Mapping[str, str]) -> ChatTemplate | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), specials, str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: not readable as a chat template ({error})") from None
    given = settings.get("chat_template")
    if isinstance(given, list):  # several, by name
        named = [entry for entry in given if isinstance(entry, dict) and entry.get("name") == "default"]
        given = named[-1].get("template") if named else None
    return None if given is None else ChatTemplate(given, specials, str(folder / "tokenizer_config.json"))


def _is_byte_level(backend: "Backend") -> bool:
    """Whether tokens are spelt in GPT-2's alphabet of 256 printable characters, one for each byte."""
    decoder = backend.decoder
    return decoder is not None and '"ByteLevel"' in decoder.__getstate__().decode()


def _byte_level(name: str) -> bytes:
    return b"".join(_BYTE_OF.get(character) or character.encode() for character in name)


def _byte_fallback(name: str) -> bytes:
    """SentencePiece spells a space as U+2581, and a byte outside its vocabulary as <0xAB>."""
    if (match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name)) is not None:
        return bytes((int(match[1], 16),))
    return name.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the other 68 for the characters from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): bytes((byte,)) for byte in printable}
    alphabet.update({chr(256 + order): bytes((byte,)) for order, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()
