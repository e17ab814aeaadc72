"""Regions on devices: bytes go from device to device where one can map the other, by the host elsewhere, and are right."""

import os
import select
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from squall.errors import PeerLost, PeerRefused, TransferFailed
from squall.live.engine.device_memory import TorchMemory
from squall.live.engine.devices import Device, Room, Shared
from squall.live.transport.device import DeviceMemory, Lent, Unreachable
from squall.live.transport.fetch import Fetch, Source
from squall.live.transport.kv import KV, Ledger, Pool, Stop, offer, pull
from squall.live.transport.memory import SharedMemory
from squall.live.transport.region import Region
from squall.live.transport.segment import HostCopies
from tests.live.transport.conftest import Node
from tests.live.transport.regions import fill, make_region, num_bytes, same

POOL = Pool(num_layers=3, num_blocks=16, block_bytes=256, num_ranks=2)
OTHER = Pool(num_layers=3, num_blocks=9, block_bytes=256, num_ranks=2)


class Blind(Shared):
    """A device that can map nobody's memory, as one without peer access."""

    def open(self, lent: Lent) -> Room:
        raise Unreachable("no peer access")


class Foreign(Shared):
    kind = "foreign"


def on(*devices: Device, size: int | None = None) -> TorchMemory:
    return TorchMemory.allocate(devices, num_bytes() if size is None else size)


def region(device: DeviceMemory | None) -> Region:
    return make_region(device=device)


def window(of: Region) -> int:
    """Bytes of host memory that are taken."""
    assert of.fd is not None
    return os.fstat(of.fd).st_blocks * 512


def emptied(of: Region) -> Region:
    """What the window showed is gone; what lies on the device is not."""
    assert of._shared is not None
    of._shared.give_back()
    return of


@pytest.mark.parametrize(
    ("there", "here", "address", "by_host"),
    [
        (Shared(), Shared(), 0, False),
        (Shared(), Shared(), -1, True),
        (Shared(), Blind(), 0, True),
        (Shared(lends=False), Shared(), 0, True),
        (Shared(), Foreign(), 0, True),
    ],
    ids=["mapped", "by tcp", "cannot map", "not lent", "other kind"],
)
def test_host_memory_is_used_only_where_devices_cannot_reach_each_other(
    node: Node, there: Device, here: Device, address: int, by_host: bool
) -> None:
    source, target = emptied(fill(region(on(there)))), region(on(here))
    server, client = node("server", [source]), node("client")
    Fetch(client, target, [Source((server.addresses[address],))]).run()
    assert (window(source) > 0, window(target) > 0) == (by_host, by_host)
    assert same(source, target)
    assert target.sums == source.sums


def test_a_device_that_cannot_be_mapped_is_told_of_once(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    server, target = node("server", [fill(region(on(Shared())))]), region(on(Blind()))
    for _ in range(3):
        link = node("client").connect(server.addresses[0])
        link.open("weights", target.fingerprint, target)
        link.close()
    told = [record.getMessage() for record in caplog.records if "mapped" in record.getMessage()]
    assert told == ["memory of a peer cannot be mapped, its bytes come by the host: no peer access"]


def test_a_chain_and_stripes_from_device_to_device(node: Node) -> None:
    first, second, third = emptied(fill(region(on(Shared())))), region(on(Shared())), region(on(Shared()))
    a, b, c = node("a", [first]), node("b", [second]), node("c")
    Fetch(b, second, [Source(a.addresses)]).run()
    Fetch(c, third, [Source(a.addresses, stripe=0), Source(b.addresses, stripe=1)], stripes=2).run()
    assert [window(each) for each in (first, second, third)] == [0, 0, 0]
    assert same(first, third)


def test_what_came_by_the_host_is_passed_on_from_the_device_and_the_other_way_round(node: Node) -> None:
    first, second, third, fourth = fill(region(on(Shared()))), *(region(on(Shared())) for _ in range(3))
    a, b, c, d = node("a", [first]), node("b", [second]), node("c", [third]), node("d")
    Fetch(b, second, [Source(a.addresses[-1:])]).run()
    Fetch(c, third, [Source(emptied_first(b.addresses, second))]).run()
    Fetch(d, fourth, [Source(c.addresses[-1:])]).run()
    assert same(first, fourth)


def emptied_first(addresses: tuple[str, ...], of: Region) -> tuple[str, ...]:
    emptied(of)
    return addresses


def test_a_section_that_comes_wrong_comes_again_from_another(node: Node) -> None:
    wrong, right, target = fill(region(on(Shared()))), fill(region(on(Shared()))), region(on(Shared()))
    assert isinstance(wrong.device, TorchMemory)
    wrong.device.tensors[0][60_000] ^= 1
    a, b, c = node("a", [wrong]), node("b", [right]), node("c")
    fetched = Fetch(c, target, [Source(a.addresses), Source(b.addresses, standby=True)]).run()
    assert fetched.num_repaired >= 1
    assert same(right, target)


def test_a_fetch_is_as_slow_as_its_link_can_be_cancelled_and_taken_up_again(node: Node) -> None:
    source, target = emptied(fill(region(on(Shared())))), region(on(Shared()))
    slow, fast, client = node("slow", [source], gbps=num_bytes() * 8 / 1e9 / 0.5), node("fast", [source]), node("client")
    fetch, began = Fetch(client, target, [Source(slow.addresses)]), time.monotonic()
    ended: list[TransferFailed] = []

    def run() -> None:
        try:
            fetch.run()
        except TransferFailed as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while len(target.missing()) > len(target.chunks) // 2:
        time.sleep(0.01)
    fetch.cancel()
    thread.join()
    assert time.monotonic() - began > 0.2
    assert [str(error) for error in ended] == ["it was cancelled"]
    left = sum(target.chunks[chunk].num_bytes for chunk in target.missing())
    assert 0 < left < num_bytes()
    assert Fetch(client, target, [Source(fast.addresses)]).run().num_bytes == {"fast": left}
    assert window(target) == 0
    assert same(source, target)


def test_nothing_is_copied_from_a_device_whose_process_is_gone_though_it_had_said_yes(node: Node) -> None:
    source, target = fill(region(on(Shared()))), region(on(Shared()))
    server = node("server", [source])
    link = node("client").connect(server.addresses[0])
    link.open("weights", target.fingerprint, target)
    link.ask("weights", [(0, 100)])
    while not select.select([link._sock], [], [], 1.0)[0]:
        pass
    server.close()
    with pytest.raises(PeerLost, match="ended the connection"):
        link.take("weights", [(0, 100)], target)
    link.close()
    assert isinstance(target.device, TorchMemory)
    assert not target.device.tensors[0].any()


def test_host_memory_and_devices_do_not_mix_and_both_sides_say_so(node: Node) -> None:
    server = node("server", [fill(region(on(Shared())))])
    with pytest.raises(PeerRefused, match="server holds a model, checksums of devices; client wants a model"):
        Fetch(node("client"), region(None), [Source(server.addresses)]).run()


def test_a_host_copy_is_left_by_one_device_and_loaded_by_another(tmp_path: Path) -> None:
    first, second = region(on(Shared())), region(on(Shared()))
    copies = HostCopies(folder=tmp_path)

    def fill_first() -> None:
        emptied(fill(first))

    assert not copies.load(first, "one", fill_first)
    assert copies.load(second, "one", lambda: pytest.fail("there is a copy"))
    assert same(first, second)
    copies.release()


# -- KV


def kv(pool: Pool, *devices: Device) -> Region:
    size = POOL.num_ranks and 2 * pool.num_layers * pool.num_blocks * pool.block_bytes
    return Region(KV, SharedMemory(pool.num_ranks * size), fingerprint="kv", device=on(*devices, size=size))


def blocks_of(of: Region, pool: Pool, blocks: Sequence[int]) -> list[bytes]:
    assert isinstance(of.device, TorchMemory)
    whole = torch.cat(of.device.tensors)
    return [bytes(whole[at : at + n].tolist()) for layer in range(pool.num_layers) for at, n in pool.segments(layer, blocks)]


@pytest.mark.parametrize("here", [Shared(), Blind()], ids=["mapped", "by the host"])
@pytest.mark.parametrize("address", [0, -1], ids=["shm", "tcp"])
def test_kv_of_several_ranks_goes_from_each_to_the_one_of_its_number(node: Node, here: Device, address: int) -> None:
    source, target = kv(POOL, Shared(), Shared()), kv(OTHER, here, here)
    assert isinstance(source.device, TorchMemory)
    for seed, tensor in enumerate(source.device.tensors):
        tensor.copy_(torch.randint(256, tensor.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    freed: list[int] = []
    ledger = Ledger(lambda taken: freed.append(taken.request))
    server, client = node("server", [source], on_notify=ledger.on_notify), node("client")
    theirs, ours = [3, 4, 11, 0], [8, 5, 6, 1]
    offered = offer(source, POOL, (server.addresses[address],), 7, 64, theirs, (0, 3))
    ledger.offered(7, 0, 3)
    pull(client, offered, target, OTHER, ours, Stop())
    assert freed == [7]
    assert blocks_of(target, OTHER, ours) == blocks_of(source, POOL, theirs)
    assert not any(map(any, blocks_of(target, OTHER, [0, 2, 3, 4, 7])))  # nothing else has changed
    by_host = bool(address) or isinstance(here, Blind)
    assert (window(source) > 0, window(target) > 0) == (by_host, by_host)
