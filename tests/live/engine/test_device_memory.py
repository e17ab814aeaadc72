"""Bytes on devices: the same code over ordinary memory, which stands for them, and over a GPU where there is one."""

import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from squall.live.engine import devices
from squall.live.engine.device_memory import TorchMemory, checksum
from squall.live.engine.devices import Cuda, Device, Shared, process
from squall.live.transport.device import Lent, Unreachable
from tests.live.forked import Forked

SIZE = 10_000


def on(kind: str) -> Device:
    if kind == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        return Cuda(torch.device("cuda", 0))
    return Shared()


@pytest.fixture(params=["memory", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    return on(request.param)


def content(seed: int, num_bytes: int) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def filled(device: Device, seed: int, parts: int = 1) -> TorchMemory:
    memory = TorchMemory.allocate([device] * parts, SIZE)
    memory.put([(part * SIZE, SIZE) for part in range(parts)], [view(content(seed + part, SIZE)) for part in range(parts)])
    return memory


def view(data: bytes) -> memoryview:
    return memoryview(bytearray(data))


def seen(memory: TorchMemory, *segments: tuple[int, int]) -> list[bytes]:
    into = [bytearray(length) for _, length in segments]
    memory.get(segments, [memoryview(each) for each in into])
    return [bytes(each) for each in into]


@contextlib.contextmanager
def lender(kind: str, seed: int, parts: int = 1) -> Iterator[tuple[Forked, list[Lent]]]:
    """A process that has lent memory of such content, until its input ends."""
    peer = Forked(
        [sys.executable, "-m", "tests.live.engine.lender", kind, str(seed), str(parts)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert peer.stdin is not None
    assert peer.stdout is not None
    with peer.stdin, peer.stdout:
        try:
            lent = [
                Lent(each[0], each[1], each[2], bytes.fromhex(each[3]), each[4]) for each in json.loads(peer.stdout.readline())
            ]
            yield peer, lent
        finally:
            peer.kill()
            peer.wait()


# -- by the host


def test_a_new_one_is_zero_and_what_is_put_is_got_and_nothing_else_has_changed(device: Device) -> None:
    memory = TorchMemory.allocate([device, device], SIZE)
    assert seen(memory, (0, SIZE), (SIZE, SIZE)) == [bytes(SIZE)] * 2
    segments = [(SIZE + 9, 100), (3, 1000), (2 * SIZE - 1, 1)]
    data = [content(at, length) for at, (_, length) in enumerate(segments)]
    memory.put(segments, [view(each) for each in data])
    assert seen(memory, *segments) == data
    whole = bytearray(2 * SIZE)
    for (offset, length), each in zip(segments, data, strict=True):
        whole[offset : offset + length] = each
    assert b"".join(seen(memory, (0, SIZE), (SIZE, SIZE))) == whole


# -- checksums


def test_a_checksum_is_of_bytes_and_their_order_wherever_they_lie(device: Device) -> None:
    memory, other = filled(device, 1), filled(Shared(), 1)
    segments = [(8, 4000), (16, 999), (5001, 3)]  # odd lengths and places, too
    assert memory.digest(segments) == other.digest(segments)
    assert memory.digest(segments) != memory.digest(segments[::-1])
    assert memory.digest([(0, 8)]) != memory.digest([(0, 16)])
    assert filled(device, 1, 2).digest([(0, SIZE), (SIZE, SIZE)]) == filled(Shared(), 1, 2).digest([(0, SIZE), (SIZE, SIZE)])
    same = TorchMemory.allocate([device], SIZE)
    same.put([(4, 4000)], [view(content(1, SIZE)[8:4008])])
    assert same.digest([(4, 4000)]) == memory.digest([(8, 4000)])


def test_no_one_bit_and_no_pair_of_the_same_bit_changes_unnoticed() -> None:
    words = torch.frombuffer(bytearray(content(2, 64)), dtype=torch.int64)

    def of(changed: torch.Tensor) -> int:
        return checksum(changed.view(torch.uint8))

    right, bits = of(words), [torch.tensor(1).bitwise_left_shift(bit) for bit in range(64)]
    assert all(of(words ^ (bit * (torch.arange(8) == at))) != right for bit in bits for at in range(8))
    pairs = [(one, other) for one in range(8) for other in range(one)]
    chosen = torch.arange(8)
    assert all(of(words ^ (bit * ((chosen == one) | (chosen == other)))) != right for bit in bits for one, other in pairs)
    assert of(words[[1, 0, *range(2, 8)]]) != right  # order counts
    zeros = torch.zeros(64, dtype=torch.uint8)
    assert checksum(zeros) != checksum(zeros[:56])


def test_a_checksum_reaches_over_many_pieces() -> None:
    data = torch.frombuffer(bytearray(content(3, 9 << 20)), dtype=torch.uint8)
    right = checksum(data)
    for at in (0, (4 << 20) - 1, 4 << 20, (9 << 20) - 1):
        data[at] ^= 1
        assert checksum(data) != right
        data[at] ^= 1
    assert checksum(data) == right


# -- from device to device


@pytest.mark.parametrize("kind", ["memory", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_another_process_lends_is_copied_and_a_link_may_map_it_twice(kind: str) -> None:
    device = on(kind)
    with lender(kind, 7, 2) as (_, lent):
        memory = TorchMemory.allocate([device, device], SIZE)
        first, second = memory.open(lent), memory.open(lent)
        memory.copy(first, [(1000, 64), (1064, 36), (SIZE + 5, 11)], [(0, 64), (64, 36), (SIZE + 20, 11)])
        first.close()
        first.close()
        memory.copy(second, [(0, 100)], [(500, 100)])
        second.close()
        there = content(7, SIZE), content(8, SIZE)
        assert seen(memory, (0, 100), (500, 100), (SIZE + 20, 11)) == [there[0][1000:1100], there[0][:100], there[1][5:16]]
        assert seen(memory, (100, 400), (SIZE, 20)) == [bytes(400), bytes(20)]


@pytest.mark.parametrize("kind", ["memory", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_mapped_can_be_read_when_its_process_was_killed_and_is_not_mapped_again(kind: str) -> None:
    memory = TorchMemory.allocate([on(kind)], SIZE)
    with lender(kind, 7) as (peer, lent):
        mapped = memory.open(lent)
        peer.kill()
        peer.wait()
        memory.copy(mapped, [(0, SIZE)], [(0, SIZE)])
        assert seen(memory, (0, SIZE)) == [content(7, SIZE)]
        mapped.close()
        with pytest.raises(Unreachable):
            memory.open(lent)


def test_a_handle_of_memory_that_is_gone_is_not_taken_for_another_one() -> None:
    memory = filled(Shared(), 1)
    (lent,) = memory.lent
    stale = Lent(lent.kind, lent.device, lent.process, b"1 " + lent.handle.partition(b" ")[2], lent.num_bytes)
    with pytest.raises(Unreachable, match="is other memory by now"):
        memory.open([stale])
    with pytest.raises(Unreachable, match="it lies on 2 devices, ours on 1"):
        memory.open([lent, lent])


@pytest.mark.gpu
def test_cuda_maps_nothing_of_its_own_process_and_what_cannot_be_mapped_breaks_nothing() -> None:
    memory = filled(on("cuda"), 1)
    (lent,) = memory.lent
    assert (lent.process, lent.device.startswith("GPU-")) == (process(), True)
    with pytest.raises(Unreachable, match="of the process itself"):
        memory.open([lent])
    with pytest.raises(Unreachable, match="cannot map memory of"):
        memory.open([Lent("cuda", "GPU-none", "another", bytes(64), SIZE)])
    assert seen(memory, (0, SIZE)) == [content(1, SIZE)]


def test_a_cpu_needs_none_of_it_and_ranks_lie_side_by_side() -> None:
    assert devices.device_of(torch.device("cpu")) is None
    assert devices.beside(torch.device("cpu"), 3) == torch.device("cpu")
    assert devices.beside(torch.device("cuda"), 3) == torch.device("cuda:3")
    assert devices.beside(torch.device("cuda:2"), 1) == torch.device("cuda:3")
