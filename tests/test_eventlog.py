"""The event log: what is written is read back, whatever kills the writer."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import zstandard
from msgspec import Struct

from squall.core.actions import (
    Abandon,
    AnyAction,
    Chunk,
    Cut,
    Decided,
    Evict,
    Forget,
    Hold,
    Join,
    LoadWeights,
    Preempt,
    Reply,
    Reserve,
    RunLayers,
    RunSteps,
    Send,
    SendActivations,
    SendKv,
    StartReplica,
    StopReplica,
    SwapIn,
    SwapOut,
    TellNeighbours,
    WarmReplica,
)
from squall.core.controller import Controller
from squall.core.events import (
    ActivationsArrived,
    ActivationsFailed,
    ActivationsSent,
    Adopted,
    AnyEvent,
    Arrived,
    BatchFormed,
    Cancelled,
    Disowned,
    DrainWanted,
    Dropped,
    Emptied,
    GpusHeld,
    HandedOver,
    HandoffFailed,
    Held,
    KeepWanted,
    Kept,
    KvArrived,
    KvFailed,
    KvSent,
    KvWanted,
    LayerArrived,
    LayersDone,
    LivePaired,
    LoadFailed,
    MoveWanted,
    NodeDown,
    NodeUp,
    NotHeld,
    NothingLeft,
    NoticeGiven,
    Offered,
    Part,
    Progressed,
    PullWanted,
    Rejection,
    ReplicaDown,
    ReplicaLost,
    ReplicaStarted,
    ReplicaStopped,
    ReplicaUp,
    ReturnWanted,
    RoleChanged,
    ScaleWanted,
    StepsDone,
    Stirred,
    Submitted,
    Surrendered,
    TakenOver,
    Unpaired,
    Warmed,
    WeightsLoaded,
    Woke,
)
from squall.core.fleet_plan import FleetPlan
from squall.core.fleet_view import Place, ReplicaView, Transfer
from squall.core.machine import Machine
from squall.core.replica import Replica
from squall.core.router import Router
from squall.core.types import CONTROLLER, FOREVER, ROUTER, SECOND, Request, Role
from squall.errors import ConfigError
from squall.eventlog import Created, EventLog, Record, describe, open_log, read, read_merged, write_merged
from squall.policies.batching import Vllm
from squall.policies.route import Pull
from squall.policies.scale import Fixed

REQUEST = Request(1, 10, 100, 50, num_output_tokens=3, block_hashes=((1 << 63) - 1, 5), session=7)

EVENTS: list[AnyEvent] = [
    Submitted(REQUEST), StepsDone(4, 2, (1, 3)), Cancelled(1), Arrived(REQUEST), Progressed(0, (1,), (2,), (3,)),
    ReplicaUp(0, 100, 16), ReplicaDown(0, True), DrainWanted(), ReplicaStarted(0), LayerArrived(0, 5), WeightsLoaded(0, 100, 16),
    LoadFailed(0, "no such file: ä"), Warmed(0), Emptied(0), ReplicaLost(0, "killed", 3), ReplicaStopped(0), Woke(),
    Stirred(), ScaleWanted(Role.DECODE, 3), ScaleWanted(Role.BOTH), NodeDown(1, 7 * SECOND), NodeUp(1),
    Progressed(0, held=(Held(1, 100), Held(2, 7, head=3, num_layers=4))), Offered(REQUEST, 103, (Part(0, 4), Part(3, 0, 4))),
    KvWanted(1, 2), KvSent(1, 2, 1 << 30, SECOND, ("node0.nic0.out",)), KvFailed(1, 2), KvArrived(1, 0, 4), Dropped(1, by=2),
    RoleChanged(0, Role.DECODE), Adopted(2, 1), NotHeld(0, 1), HandoffFailed(0, 1, 2), Kept(0, (1, 2)),
    LivePaired(1, 0, 32), Unpaired(1, 0, True), LayersDone(3, 5, (1,)), PullWanted(0, 40), HandedOver(1, 3, 5, (REQUEST,)),
    NothingLeft(7), BatchFormed(), ActivationsSent(3), ActivationsFailed(3), ActivationsArrived(3), TakenOver(0, 1, (1,)),
    Surrendered(0, (1,)), Disowned((1,)), MoveWanted((1, 2)), ReturnWanted((1,)), KeepWanted((2,)), NoticeGiven(0, SECOND),
    GpusHeld(1, (0, 1)),
]  # fmt: skip

ACTIONS: list[AnyAction] = [
    Send(0, Submitted(REQUEST)), RunSteps(1, FOREVER, 3, 400, (Chunk(1, 16, 84, 16, True),), (9, 8)), Cut(1), Preempt((1,)),
    Forget((2, 3)), Reply(1, Rejection.QUEUE_FULL, "full", 2.5), StartReplica(0),
    LoadWeights(0, Transfer("m", Place("ssd", 0), (0,), "disk")), WarmReplica(0),
    Hold((1,)), Reserve(1, 100, (9,)), Join((1, 2), 0), SendKv(1, 2, 0, 0, 100), Abandon((1,)),
    SwapOut((1, 2)), SwapIn(1, 3, (9,)), Evict((8, 9)),
    RunLayers(3, 0, 1, (Chunk(1, 0, 100, 0, True),)), SendActivations(3, 0, 100),
    StopReplica(0), Decided(Role.BOTH, 1, 2, "queue wait 1.2 s > 0.4 s"), TellNeighbours(GpusHeld(1, (0,))),
]  # fmt: skip

RECORDS = [Record(number, -1, event, ACTIONS) for number, event in enumerate(EVENTS)]


def write(path: Path, records: list[Record], frame_bytes: int = 1 << 18) -> Path:
    with open_log(path, frame_bytes) as log:
        for record in records:
            assert record.event is not None
            log.record(record.now, record.machine, record.event, record.actions)
    return path


def test_every_event_and_action_is_read_back_as_it_was(tmp_path: Path) -> None:
    assert {type(event) for event in EVENTS} == set(get_args(AnyEvent))
    assert {type(action) for action in ACTIONS} == set(get_args(AnyAction))
    assert list(read(write(tmp_path / "log", RECORDS))) == RECORDS


def test_a_person_can_read_a_line(tmp_path: Path) -> None:
    path = write(tmp_path / "log", [Record(5, ROUTER, Cancelled(7), [Send(0, Cancelled(7))])])
    text = zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes())
    event = '{"event":"Cancelled","request":7}'
    assert text.decode() == f'{{"now":5,"machine":-1,"event":{event},"actions":[{{"action":"Send","to":0,"event":{event}}}]}}\n'


def test_a_log_that_was_cut_off_anywhere_is_read_up_to_a_record_and_can_be_continued(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", RECORDS, frame_bytes=1500).read_bytes()
    frames = [found.start() for found in re.finditer(re.escape(b"\x28\xb5\x2f\xfd"), whole)]
    assert len(frames) > 5
    seen = set()
    for length in sorted({*range(0, len(whole), 101), *(frame + by for frame in frames[1:] for by in (-1, 0, 1, 5))}):
        path = tmp_path / f"cut-{length}"
        path.write_bytes(whole[:length])
        survived = list(read(path))
        assert survived == RECORDS[: len(survived)]
        seen.add(len(survived))
        write(path, RECORDS[:2])
        continued = list(read(path))
        assert continued[-2:] == RECORDS[:2]
        assert continued[:-2] == RECORDS[: len(continued) - 2]
    assert len(seen) > 5


def test_memory_is_bounded_by_the_frame(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log", frame_bytes=1)
    log.record(1, 0, Woke(), [])
    assert len(list(read(tmp_path / "log"))) == 1
    log.close()
    log.close()
    log = open_log(tmp_path / "log")
    log.record(2, 0, Woke(), [])
    assert len(list(read(tmp_path / "log"))) == 1
    log.flush()
    assert len(list(read(tmp_path / "log"))) == 2
    log.close()


def test_a_full_disk_ends_the_log_and_not_its_owner() -> None:
    told: list[OSError] = []
    log = EventLog(open("/dev/full", "wb"), frame_bytes=1, given_up=told.append)  # noqa: SIM115 - closed by the log
    for now in range(3):
        log.record(now, 0, Woke(), [])
        log.flush()
    log.close()
    assert [error.errno for error in told] == [errno.ENOSPC]


def test_a_full_disk_is_an_error_where_nobody_else_would_notice() -> None:
    log = EventLog(open("/dev/full", "wb"))  # noqa: SIM115 - closed by the log
    log.record(1, 0, Woke(), [])
    with pytest.raises(OSError, match="No space left"):
        log.close()
    log.close()


WRITER = """
import sys
from pathlib import Path
from squall.core.events import StepsDone
from squall.eventlog import open_log
log = open_log(Path(sys.argv[1]), 1000)
number = 0
while True:
    number += 1
    log.record(number, 0, StepsDone(number, 1), [])
"""


def test_a_writer_that_is_killed_leaves_a_log_without_gaps(tmp_path: Path) -> None:
    path = tmp_path / "log"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    deadline = time.monotonic() + 60
    while not (path.exists() and path.stat().st_size > 20_000) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(writer.pid, signal.SIGKILL)
    assert writer.wait() == -signal.SIGKILL
    instants = [record.now for record in read(path)]
    assert len(instants) > 100
    assert instants == list(range(1, len(instants) + 1))


def test_several_logs_are_read_and_written_in_the_order_of_time(tmp_path: Path) -> None:
    first = write(tmp_path / "a", [Record(now, 0, Woke()) for now in (1, 4, 4, 9)])
    second = write(tmp_path / "b", [Record(now, 1, Woke()) for now in (2, 4, 8)])
    order = [(record.now, record.machine) for record in read_merged([first, second])]
    assert order == [(1, 0), (2, 1), (4, 0), (4, 0), (4, 1), (8, 1), (9, 0)]
    write_merged([first, second], tmp_path / "all")
    assert [(record.now, record.machine) for record in read(tmp_path / "all")] == order
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "all", "b"]


def test_a_merge_that_fails_leaves_nothing(tmp_path: Path) -> None:
    good = write(tmp_path / "good", RECORDS)
    (tmp_path / "bad").write_bytes(b"something else")
    with pytest.raises(ConfigError):
        write_merged([good, tmp_path / "bad"], tmp_path / "all")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "good"]


class Mine(Struct, frozen=True):
    """A user's own policy."""

    weight: float = 2.0

    def rank(self, replica: ReplicaView) -> float:
        return self.weight * replica.num_tokens


@pytest.mark.parametrize(
    ("machine", "parameters"),
    [
        (
            Router(Pull(max_outstanding=3), 10, 1000, 2),
            {
                "policy": {"kind": "pull", "max_outstanding": 3},
                "max_queued_requests": 10,
                "max_queued_tokens": 1000,
                "max_retries": 2,
                "elastic": False,
                "max_model_len": None,
            },
        ),
        (
            Router(Mine(), 10, 1000, 2),
            {
                "policy": {"kind": f"{__name__}:Mine", "weight": 2.0},
                "max_queued_requests": 10,
                "max_queued_tokens": 1000,
                "max_retries": 2,
                "elastic": False,
                "max_model_len": None,
            },
        ),
        (
            Controller(FleetPlan.fixed(3), Fixed()),
            {"plan": msgspec.json.decode(msgspec.json.encode(FleetPlan.fixed(3))), "scale": {"kind": "fixed"}, "load": None},
        ),
        (
            Replica(4, Vllm(), 100, 16),
            {"id": 4, "policy": msgspec.to_builtins(Vllm()), "num_blocks": 100, "block_size": 16},
        ),
    ],
)
def test_how_a_machine_was_made_is_logged(machine: Machine, parameters: dict[str, object], tmp_path: Path) -> None:
    assert describe(machine).parameters == parameters
    with open_log(tmp_path / "log") as log:
        log.created(3, CONTROLLER, machine)
    assert list(read(tmp_path / "log")) == [Record(3, CONTROLLER, created=Created(type(machine).__name__, parameters))]


# -- bad input


def test_a_missing_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: cannot read the event log: No such file"):
        list(read(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"log: cannot write the event log: No such file"):
        open_log(tmp_path / "no" / "log")


def test_a_file_that_is_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a log at all, but dear to someone")
    for use in (lambda: list(read(path)), lambda: open_log(path)):
        with pytest.raises(ConfigError, match=r"notes\.txt: not an event log, or damaged after byte 0"):
            use()
    assert path.read_text().startswith("not a log")


@pytest.mark.parametrize(
    "line", [b'{"now":1}', b'{"now":"noon","machine":0}', b'{"now":1,"machine":0,"event":{"event":"Fell"}}', b"x"]
)
def test_a_broken_line_is_named(line: bytes, tmp_path: Path) -> None:
    path = write(tmp_path / "log", RECORDS[:2])
    with open(path, "ab") as file:
        file.write(zstandard.ZstdCompressor().compress(line + b"\n"))
    with pytest.raises(ConfigError, match=r"log: line 3 is not a record of an event log: "):
        list(read(path))
