"""One request as an engine sees it: its tokens, when it ends, and the text that may be shown.

Knows neither tensors nor KV blocks nor how tokens are chosen: real and emulated engines share it. Text leaves it only when
it is certain: never half a character, never what may turn out to be the start of a stop string.
"""

import codecs
from collections.abc import Sequence

from msgspec.structs import replace

from squall.live.engine.interface import Job, TokenLogprob, TokenOut
from squall.live.engine.tokenizer import Tokenizer

Candidate = tuple[int, float]
"""A token and its natural-log probability."""


class TextStream:
    """Token bytes to text that is certain.

    Args:
        stops: strings at which the text ends; it never contains one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending = ""

    def push(self, piece: bytes, *, may_stop: bool) -> tuple[str, str | None]:
        """Add a token's bytes. Returns the text that became certain and the stop string that ended it, if one did."""
        self._pending += self._decoder.decode(piece)
        if may_stop and (found := self._first_stop()) is not None:
            at, stop = found
            return self._take(at), stop
        return self._take(len(self._pending) - self._held()), None

    def flush(self) -> str:
        """What is left at the end; an incomplete character shows as U+FFFD."""
        self._pending += self._decoder.decode(b"", final=True)
        return self._take(len(self._pending))

    def _take(self, count: int) -> str:
        text, self._pending = self._pending[:count], self._pending[count:]
        return text

    def _first_stop(self) -> tuple[int, str] | None:
        hits = [(at, order, stop) for order, stop in enumerate(self._stops) if (at := self._pending.find(stop)) >= 0]
        if not hits:
            return None
        at, _, stop = min(hits)
        return at, stop

    def _held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(self._pending)), 0, -1):
            end = self._pending[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0


class SequenceState:
    """The tokens of one request and how far it is.

    Args:
        job: the request's data. Its `output` is taken as said already: it counts, but is not emitted again.
        tokenizer: for text and for what ends a sequence.
        max_model_len: the longest prompt plus output; the sequence ends there with "length".

    Attributes:
        tokens: prompt and output.
        num_prompt_tokens: how many of them are the prompt.
        num_cached_tokens: of the prompt, found in the prefix cache; the engine sets it at the first chunk.
        finished: it has ended; no more tokens are taken.
    """

    def __init__(self, job: Job, tokenizer: Tokenizer, max_model_len: int) -> None:
        sampling = job.sampling
        self.job = job
        self.tokens: list[int] = list(job.prompt)
        self.num_prompt_tokens = len(job.prompt)
        self.num_cached_tokens = 0
        self.finished = False
        self._tokenizer = tokenizer
        self._length_limit = min(self.num_prompt_tokens + sampling.max_tokens, max_model_len)
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._eos_ids = frozenset() if sampling.ignore_eos else tokenizer.eos_token_ids
        self._text = TextStream(sampling.stop)
        for token in job.output:
            self.tokens.append(token)
            self._text.push(self._piece(token), may_stop=False)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def forbidden(self) -> frozenset[int]:
        """Tokens that may not come next: those that would end the sequence before `min_tokens`."""
        if self.num_output_tokens < self.job.sampling.min_tokens:
            return self._eos_ids | self._stop_ids
        return frozenset()

    def accept(self, token: int, logprob: float | None = None, top: Sequence[Candidate] = ()) -> TokenOut:
        """Take the next token. `logprob` and `top` belong to the model's own distribution, before any sampling parameter."""
        self.tokens.append(token)
        long_enough = self.num_output_tokens >= self.job.sampling.min_tokens
        finish: str | None = None
        reason: str | int | None = None
        if long_enough and (token in self._stop_ids or token in self._eos_ids):
            finish, reason = "stop", token if token in self._stop_ids else None
            text = self._text.flush()
        else:
            text, reason = self._text.push(self._piece(token), may_stop=long_enough)
            if reason is not None:
                finish = "stop"
            elif len(self.tokens) >= self._length_limit:
                finish = "length"
                text += self._text.flush()
        self.finished = finish is not None
        return TokenOut(
            request=self.job.request,
            token=token,
            text=text,
            finish=finish,
            stop_reason=reason,
            num_cached_tokens=self.num_cached_tokens,
            logprob=None if logprob is None else self._describe(token, logprob),
            top=tuple(self._describe(*candidate) for candidate in top),
        )

    def share_nothing(self) -> None:
        """Its prompt's blocks are not to be found by others from now on."""
        if self.job.block_hashes:
            self.job = replace(self.job, block_hashes=())

    def _piece(self, token: int) -> bytes:
        if self.job.sampling.skip_special_tokens and self._tokenizer.is_special(token):
            return b""
        return self._tokenizer.token_bytes(token)

    def _describe(self, token: int, logprob: float) -> TokenLogprob:
        piece = self._tokenizer.token_bytes(token)
        return TokenLogprob(token, piece.decode("utf-8", errors="replace"), piece, logprob)
