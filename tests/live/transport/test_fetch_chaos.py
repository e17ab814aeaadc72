"""Fetches at random, in chains and in stripes, over wires that break, hang or turn bits: each ends, right or with a reason."""

import random
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from squall.errors import TransferFailed
from squall.live.engine.device_memory import TorchMemory
from squall.live.engine.devices import Shared
from squall.live.transport.device import DeviceMemory
from squall.live.transport.endpoint import Endpoint
from squall.live.transport.fetch import Fetch, Source
from squall.live.transport.multicast import chains, striped
from squall.live.transport.region import Region
from tests.live.transport.conftest import Node
from tests.live.transport.regions import fill, make_region, num_bytes, same
from tests.live.transport.test_fetch import MakeWire

PATIENCE_S = 0.3
ENDS_WITHIN_S = 60.0
ATTEMPTS = 3
"""A load that has failed is ordered again: what has arrived stays."""


def address_of(end: Endpoint, dice: random.Random, wire: MakeWire) -> tuple[str, ...]:
    """By memory, by TCP, or over a wire that is not to be trusted."""
    if dice.random() < 0.6:
        return end.addresses if dice.random() < 0.5 else end.addresses[-1:]
    positions = [dice.randrange(1, 400_000) for _ in range(dice.randint(1, 4))]
    how: list[dict[str, object]] = [{"flips": positions}, {"breaks": positions}, {"hangs": positions[0]}]
    return (wire(end, **dice.choice(how)).address,)


def outcome(end: Endpoint, region: Region, sources: Sequence[Source], stripes: int) -> str | None:
    """None where all has come, else why not."""
    reason = None
    for _ in range(ATTEMPTS):
        try:
            Fetch(end, region, sources, stripes=stripes).run()
        except TransferFailed as error:
            reason = str(error)
        else:
            return None
    return reason


def in_host_memory(_: random.Random) -> DeviceMemory | None:
    return None


def on_a_device(dice: random.Random) -> DeviceMemory:
    """Most can be mapped by others."""
    return TorchMemory.allocate([Shared(lends=dice.random() < 0.8)], num_bytes())


def play(seed: int, node: Node, wire: MakeWire, home: Callable[[random.Random], DeviceMemory | None] = in_host_memory) -> int:
    """How many receivers have it all in the end; that each has an end, and no byte is wrong."""
    dice = random.Random(seed)
    lanes, hosts = dice.choice([1, 2, 2, 3]), dice.choice([1, 2, 3])
    upto = dice.choice([0, 2, None, None])  # of what sources have when it begins: they may be loading
    held = {f"source {lane}": fill(make_region(device=home(dice)), upto=upto) for lane in range(lanes)}
    groups = [[f"receiver {host}.{lane}" for lane in range(lanes)] for host in range(hosts)]
    regions = {name: make_region(device=home(dice)) for group in groups for name in group}
    ends = {
        name: node(name, [region], patience_s=PATIENCE_S, gbps=dice.choice([None, None, 0.02, 0.2]))
        for name, region in {**held, **regions}.items()
    }
    addresses = {name: address_of(end, dice, wire) for name, end in ends.items()}
    in_stripes = dice.random() < 0.6
    plan = striped([*held], groups, addresses) if in_stripes else chains([*held], [*regions], addresses)
    ended: dict[str, str | None] = {}

    def receive(name: str) -> None:
        ended[name] = outcome(ends[name], regions[name], plan[name], lanes if in_stripes else 1)

    threads = [threading.Thread(target=receive, args=(name,), daemon=True) for name in regions]
    for thread in threads:
        thread.start()
    time.sleep(dice.uniform(0, 0.1))
    if dice.random() < 0.4:
        ends[dice.choice([*ends][1:])].close()
    time.sleep(dice.uniform(0, 0.1))
    for region in held.values():
        fill(region)
    deadline = time.monotonic() + ENDS_WITHIN_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert sorted(ended) == sorted(regions), f"seed {seed}: no end of {sorted(regions.keys() - ended.keys())}"
    whole = [name for name, reason in ended.items() if reason is None]
    assert all(same(held["source 0"], regions[name]) for name in whole), f"seed {seed}: wrong bytes"
    return len(whole)


@pytest.mark.parametrize("seed", range(3))
def test_every_fetch_ends_right_or_with_a_reason(node: Node, wire: MakeWire, seed: int) -> None:
    play(seed, node, wire)


@pytest.mark.parametrize("seed", range(3))
def test_every_fetch_ends_right_or_with_a_reason_where_bytes_lie_on_devices(node: Node, wire: MakeWire, seed: int) -> None:
    play(seed, node, wire, on_a_device)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("home", [in_host_memory, on_a_device])
def test_many_fetches_end_right_or_with_a_reason_and_most_are_right(
    node: Node, wire: MakeWire, home: Callable[[random.Random], DeviceMemory | None]
) -> None:
    assert sum(play(seed, node, wire, home) for seed in range(100, 300)) > 600
