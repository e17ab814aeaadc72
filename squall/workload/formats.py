"""The trace formats: by which names their columns go, and in what they count. Knows no file; docs/workloads.md shows examples.

A format is recognised by the columns that it must have. Other columns are ignored.
"""

from collections.abc import Collection

from msgspec import Struct

from squall.core.types import MICROSECOND, MILLISECOND, SECOND, Nanos

CHARS_PER_TOKEN = 4
"""What a token of English text and code is taken for where a trace counts characters."""


class Format(Struct, frozen=True):
    """One format. Of several names for a column the first that is there counts.

    Attributes:
        name: as in `workload.format`.
        arrival, prompt, output: the columns of when, how long and how long the answer.
        unit: what arrivals count in; 0 where they are dates.
        whole_times: arrivals are whole numbers, so that fractions betray another unit.
        timeless: there may be lengths alone.
        chars: lengths count characters, of which `CHARS_PER_TOKEN` make a token.
        least_prompt: 0 where prompts of no tokens are known to occur; they count as 1.
        session: the columns that together name a conversation.
        turn: the place in its session; rows of a session follow in order of arrival where there is none.
        shared: how much of the prompt the turn before began with too; the whole history where there is none.
        chat, parent: the row's own name and that of the turn before.
        blocks, block_size: names of the prompt's blocks, and tokens a block (0: the file says so in a column `block_size`).
        marks: columns that set it apart from a format with the same required ones.
    """

    name: str
    arrival: tuple[str, ...]
    prompt: tuple[str, ...]
    output: tuple[str, ...]
    unit: Nanos = SECOND
    whole_times: bool = False
    timeless: bool = False
    chars: bool = False
    least_prompt: int = 1
    session: tuple[str, ...] = ()
    turn: str = ""
    shared: str = ""
    chat: str = ""
    parent: str = ""
    blocks: str = ""
    block_size: int = 0
    marks: tuple[str, ...] = ()

    @property
    def optional(self) -> tuple[str, ...]:
        """Columns that are read where they are."""
        names = (*self.session, self.turn, self.shared, self.chat, self.parent, self.blocks)
        own = ("block_size",) if self.blocks and not self.block_size else ()
        return (*(name for name in names if name), *own)

    def absent(self, columns: Collection[str]) -> list[str]:
        """What it must have and `columns` have not, as words."""
        wanted = [self.prompt, self.output] if self.timeless else [self.arrival, self.prompt, self.output]
        return [" or ".join(names) for names in wanted if not set(names) & set(columns)]


SQUALL = Format(
    "squall", ("arrived_at_s",), ("num_prompt_tokens",), ("num_output_tokens",), timeless=True,
    session=("session",), turn="turn", blocks="block_hashes",
)  # fmt: skip
VIDUR = Format("vidur", ("arrived_at",), ("num_prefill_tokens",), ("num_decode_tokens",), timeless=True)
AZURE = Format("azure", ("TIMESTAMP",), ("ContextTokens",), ("GeneratedTokens",), unit=0)
BURSTGPT = Format("burstgpt", ("Timestamp",), ("Request tokens",), ("Response tokens",), least_prompt=0, session=("Session ID",))
BAILIAN = Format(
    "bailian", ("timestamp",), ("input_length",), ("output_length",),
    chat="chat_id", parent="parent_chat_id", blocks="hash_ids", block_size=16, marks=("chat_id",),
)  # fmt: skip
MOONCAKE = Format(
    "mooncake", ("timestamp",), ("input_length",), ("output_length",),
    unit=MILLISECOND, whole_times=True, blocks="hash_ids", block_size=512,
)  # fmt: skip
LMCACHE = Format(
    "lmcache", ("timestamp_raw",), ("input_chars",), ("output_chars",),
    unit=MICROSECOND, chars=True, least_prompt=0,
    session=("project", "session_id"), turn="turn", shared="common_prefix_chars_with_previous_turn",
)  # fmt: skip
AIBRIX = Format("aibrix", ("timestamp_ms",), ("prompt_tokens",), ("output_tokens",), unit=MILLISECOND)
FISSIONSPEC = Format("fissionspec", ("arrival_ms",), ("prompt_tokens",), ("output_tokens",), unit=MILLISECOND)
VLLM = Format("vllm", ("arrival_time",), ("input_toks",), ("output_toks",))

FORMATS = (SQUALL, VIDUR, AZURE, BURSTGPT, MOONCAKE, BAILIAN, LMCACHE, AIBRIX, FISSIONSPEC, VLLM)


def recognise(columns: Collection[str]) -> Format:
    """The format of a file with these columns; the likeliest where none fits, so that what is absent can be told."""
    there = set(columns)

    def likeness(form: Format) -> tuple[bool, int]:
        names = (*form.arrival, *form.prompt, *form.output, *form.optional)
        fits = not form.absent(there) and there.issuperset(form.marks)
        return fits, len(there.intersection(names))

    return max(FORMATS, key=likeness)  # of equals the first


def by_name(name: str) -> Format:
    return next(form for form in FORMATS if form.name == name)
