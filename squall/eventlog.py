"""The event log of a run, `events.jsonl.zst`: how every machine was made, and every event with the actions it led to.

One JSON object a line, compressed in independent zstd frames of whole lines: whatever kills the writer, all frames before the
last one can be read, and `zstdcat` shows it to a person. One file a process; `write_merged` makes one of several. Knows no
machine's workings and no run directory.
"""

from __future__ import annotations

import contextlib
import heapq
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import msgspec
import zstandard
from msgspec import Struct

from squall.core.actions import AnyAction
from squall.core.controller import Controller
from squall.core.disaggregated import DisaggregatedRouter
from squall.core.events import AnyEvent
from squall.core.handoff_router import HandoffRouter
from squall.core.machine import Machine
from squall.core.pipeline import PipelinedReplica
from squall.core.replica import Replica
from squall.core.router import Router
from squall.core.types import MachineId, Nanos
from squall.errors import ConfigError

FRAME_BYTES = 256 * 1024
"""JSON kept in memory before it is compressed and written."""


class Created(Struct, frozen=True):
    """How a machine was made. `parameters` are its constructor's, by name; a policy is a table whose `kind` names it."""

    kind: str
    parameters: dict[str, Any]


class Record(Struct, frozen=True, omit_defaults=True):
    """One line: at `now` the machine was made, or it took an event in and answered with actions."""

    now: Nanos
    machine: MachineId
    event: AnyEvent | None = None
    actions: Sequence[AnyAction] = ()
    created: Created | None = None


class EventLog:
    """Writes a log; `open_log` opens one. `created` and `record` are meant for a driver, one thread at a time.

    Nothing that was flushed is lost when the process is killed; a crash of the whole machine may cost the latest seconds, as the
    disk is only waited for at `close`.

    Args:
        file: written at its end.
        frame_bytes: how much to keep in memory (at most one record more).
        given_up: told, once, why the log ends here (a full disk), after which nothing is written any more. None: such an error
            is raised.
    """

    def __init__(self, file: BinaryIO, frame_bytes: int = FRAME_BYTES, given_up: Callable[[OSError], None] | None = None) -> None:
        self._file = file
        self._frame_bytes = frame_bytes
        self._given_up = given_up
        self._pending = bytearray()
        self._encoder = msgspec.json.Encoder()
        self._compressor = zstandard.ZstdCompressor(level=3)

    def created(self, now: Nanos, machine: MachineId, made: Machine) -> None:
        """A machine begins, or begins anew. Its own events must come after."""
        self.write(Record(now, machine, created=describe(made)))

    def record(self, now: Nanos, machine: MachineId, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        """A machine took `event` in and wants `actions` done."""
        self.write(Record(now, machine, event, actions))

    def write(self, record: Record) -> None:
        """One line."""
        if self._file.closed:
            return
        self._encoder.encode_into(record, self._pending, -1)
        self._pending += b"\n"
        if len(self._pending) >= self._frame_bytes:
            self.flush()

    def flush(self) -> None:
        """Hand everything so far to the operating system."""
        if self._pending:
            frame = self._compressor.compress(self._pending)
            self._pending.clear()
            with self._enduring():
                self._file.write(frame)
                self._file.flush()

    def close(self) -> None:
        """Flush, and wait for the disk. Idempotent."""
        self.flush()
        if not self._file.closed:
            with self._enduring():
                os.fsync(self._file.fileno())
                self._file.close()

    @contextlib.contextmanager
    def _enduring(self) -> Iterator[None]:
        """What cannot be written must not take down who writes it."""
        try:
            yield
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.close()
            if self._given_up is None:
                raise
            self._given_up(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_log(path: Path, frame_bytes: int = FRAME_BYTES, given_up: Callable[[OSError], None] | None = None) -> EventLog:
    """A log at `path`. An existing one is continued after its last complete frame (a worker that was started again).

    Raises:
        ConfigError: the file cannot be written, or is something else.
    """
    complete = 0
    if path.exists():
        with _open_to_read(path) as file:
            complete = max((end for _, end in _frames(path, file)), default=0)
    try:
        file = open(path, "ab")  # noqa: SIM115 - closed by the log
        file.truncate(complete)  # a frame that was cut off would hide all that comes after it
    except OSError as error:
        raise ConfigError(f"{path}: cannot write the event log: {error.strerror}") from None
    return EventLog(file, frame_bytes, given_up)


def describe(machine: Machine) -> Created:
    """How to make such a machine again."""
    match machine:
        case Router():
            names: tuple[str, ...] = (
                "policy", "max_queued_requests", "max_queued_tokens", "max_retries", "elastic", "max_model_len",
            )  # fmt: skip
            if isinstance(machine, HandoffRouter):
                names += ("max_share", "max_ratio", "moves")
            if isinstance(machine, DisaggregatedRouter):
                names += ("decode_policy",)
        case Controller():
            names = ("plan", "scale", "load")
        case PipelinedReplica():
            names = ("id", "policy", "num_blocks", "block_size", "num_stages")
        case Replica():
            names = ("id", "policy", "num_blocks", "block_size")
        case _:
            raise TypeError(f"{type(machine).__name__} cannot be described: not a machine of squall's")
    parameters = {name: _plain(getattr(machine, name)) for name in names}
    return Created(type(machine).__name__, parameters)


def _plain(value: Any) -> Any:
    """As it is read again. A user's own policy is named as in a configuration: `package.module:Class`."""
    if not isinstance(value, Struct):
        return value
    table: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    policy = type(value)
    if policy.__module__.partition(".")[0] != "squall":
        table["kind"] = f"{policy.__module__}:{policy.__qualname__}"
    return table


def read(path: Path) -> Iterator[Record]:
    """The records of a log in the order of writing, up to the last one that is complete.

    Raises:
        ConfigError: the file cannot be read, is no event log, or a line in the middle is broken.
    """
    decoder = msgspec.json.Decoder(Record)
    for number, line in enumerate(_lines(path), start=1):
        try:
            yield decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}: line {number} is not a record of an event log: {error}") from None


def read_merged(paths: Iterable[Path]) -> Iterator[Record]:
    """The records of several logs, ascending in time; ties in the order of `paths`. Their clocks must have one origin."""
    return heapq.merge(*(read(path) for path in paths), key=lambda record: record.now)


def write_merged(paths: Iterable[Path], path: Path) -> None:
    """Write several logs as one to `path`, which appears when it is complete."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        with open_log(partial) as log:
            for record in read_merged(paths):
                log.write(record)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _lines(path: Path) -> Iterator[bytes]:
    """Complete lines only."""
    rest = b""
    with _open_to_read(path) as file:
        for text, _ in _frames(path, file):
            lines = (rest + text).split(b"\n")
            rest = lines.pop()
            yield from lines


def _frames(path: Path, file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """What the frames of `file` hold, each in one or more pieces; with it, where the last complete frame ends (its offset)."""
    frame = zstandard.ZstdDecompressor().decompressobj()
    end = read = 0
    while data := file.read(1 << 16):
        read += len(data)
        while data:
            try:
                text = frame.decompress(data)
            except zstandard.ZstdError as error:
                raise ConfigError(f"{path}: not an event log, or damaged after byte {end}: {error}") from None
            data = frame.unused_data
            if frame.eof:
                end = read - len(data)
                frame = zstandard.ZstdDecompressor().decompressobj()
            yield text, end


def _open_to_read(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the event log: {error.strerror}") from None
