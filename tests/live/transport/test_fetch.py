"""Filling a region from peers: whatever happens on the way, every byte is right or the fetch has failed and says why."""

import random
import threading
from collections.abc import Callable

import pytest

from squall.errors import PeerLost, TransferFailed
from squall.live.transport.fetch import Fetch, Fetched, Source
from squall.live.transport.multicast import chains, striped
from tests.live.transport.conftest import Node, Wire
from tests.live.transport.regions import fill, make_region, same

MakeWire = Callable[..., Wire]


class Running:
    """A fetch in a thread."""

    def __init__(self, fetch: Fetch) -> None:
        self.fetch = fetch
        self.result: Fetched | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self.fetch.run()
        except TransferFailed as error:
            self.error = error

    def done(self) -> Fetched:
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


@pytest.mark.parametrize("backend", [0, -1], ids=["shm", "tcp"])
def test_what_arrives_is_what_was_sent(node: Node, backend: int) -> None:
    there, here = fill(make_region()), make_region()
    source = node("source", [there])
    seen: list[int] = []
    result = Fetch(node("target"), here, [Source((source.addresses[backend],))], arrived=seen.append).run()
    assert same(there, here)
    assert here.complete
    assert here.sums == there.sums
    assert seen == list(range(len(here.sections)))
    assert result == Fetched({"source": sum(part.num_bytes for part in there.sections)}, 0, ())


def test_an_address_that_does_not_answer_is_passed_over(node: Node) -> None:
    there, here = fill(make_region()), make_region()
    source = node("source", [there])
    Fetch(node("target"), here, [Source(("shm://squall-nobody", source.addresses[-1]))]).run()
    assert same(there, here)


@pytest.mark.parametrize("length", [1, 3])
def test_a_chain_passes_on_what_it_is_still_receiving(node: Node, length: int) -> None:
    there = fill(make_region())
    regions = {f"n{index}": make_region() for index in range(length)}
    source = node("source", [there])
    peers = {name: node(name, [region]) for name, region in regions.items()}
    addresses = {name: peer.addresses for name, peer in {"source": source, **peers}.items()}
    plan = chains(["source"], list(regions), addresses)
    running = [Running(Fetch(peers[name], regions[name], plan[name])) for name in reversed(regions)]
    results = dict(zip(reversed(regions), (each.done() for each in running), strict=True))
    assert all(same(there, region) for region in regions.values())
    before = ["source", *regions]
    assert {name: set(result.num_bytes) for name, result in results.items()} == {
        name: {before[index]} for index, name in enumerate(regions)
    }


def test_stripes_over_two_sources_are_gathered_inside_each_host(node: Node) -> None:
    there = fill(make_region())
    names = ["a0", "a1", "b0", "b1"]
    regions = {name: make_region() for name in names}
    peers = {name: node(name, [region]) for name, region in regions.items()}
    sources = {name: node(name, [there]) for name in ("s0", "s1")}
    addresses = {name: peer.addresses for name, peer in {**peers, **sources}.items()}
    plan = striped(["s0", "s1"], [["a0", "a1"], ["b0", "b1"]], addresses)
    running = {name: Running(Fetch(peers[name], regions[name], plan[name], stripes=2)) for name in names}
    results = {name: each.done() for name, each in running.items()}
    assert all(same(there, region) for region in regions.values())
    assert {name: set(result.num_bytes) for name, result in results.items()} == {
        "a0": {"s0", "a1"}, "a1": {"s1", "a0"}, "b0": {"a0", "b1"}, "b1": {"a1", "b0"},
    }  # fmt: skip


def test_a_source_that_is_still_loading_gives_what_it_has_as_it_comes(node: Node) -> None:
    there, here = make_region(), make_region()
    running = Running(Fetch(node("target"), here, [Source(node("source", [there]).addresses)]))
    fill(there, upto=2)
    assert here.wait_verified(1, 10)
    assert not here.verified(2)
    fill(there)
    running.done()
    assert same(there, here)


def test_a_broken_connection_is_taken_up_again_at_the_chunk(node: Node, wire: MakeWire) -> None:
    there, here = fill(make_region()), make_region()
    spoilt = wire(node("source", [there]), breaks=[30_000, 200_000, 390_000])
    result = Fetch(node("target"), here, [Source((spoilt.address,))]).run()
    assert same(there, here)
    assert spoilt.num_connections == 4
    assert result.num_bytes == {"source": sum(part.num_bytes for part in there.sections)}  # nothing twice


@pytest.mark.parametrize("seed", range(5))
def test_a_section_that_arrives_wrong_comes_again_and_is_never_ready(node: Node, wire: MakeWire, seed: int) -> None:
    there, here = fill(make_region()), make_region()
    at = random.Random(seed).randrange(60_000, 400_000)
    spoilt = wire(node("source", [there]), flips=[at])
    seen: list[tuple[int, bool]] = []

    def look(section: int) -> None:
        place = here.sections[section]
        segment = (place.offset, place.num_bytes)
        seen.append((section, here.view(segment) == there.view(segment)))

    result = Fetch(node("target"), here, [Source((spoilt.address,))], arrived=look).run()
    assert same(there, here)
    assert all(right for _, right in seen)
    assert len(seen) == len(here.sections)
    # A bit in a header breaks the connection, one in the data spoils a section: either way nothing wrong was ready.
    assert result.num_repaired == 1 or spoilt.num_connections > 1


def test_a_section_that_is_always_wrong_fails_after_three_more_attempts(node: Node) -> None:
    there, here = fill(make_region()), make_region()
    there.memory[there.sections[2].offset] ^= 1  # after its checksum was taken: bad memory
    with pytest.raises(TransferFailed, match=r"section 2 of weights came 4 times with a wrong checksum"):
        Fetch(node("target"), here, [Source(node("source", [there]).addresses)]).run()
    assert not here.verified(2)


def test_two_that_wait_for_each_others_word_on_the_same_section_ask_somebody_else(node: Node) -> None:
    """As members of a host that exchange stripes do, both dialled before either knew a checksum."""
    there, regions = fill(make_region()), [make_region(), make_region()]
    source = Source(node("source", [there]).addresses, standby=True)
    ends = [node("one", [regions[0]]), node("two", [regions[1]])]
    for lane, region in enumerate(regions):
        region.memory[:] = there.memory
        for section in (0, 2, 3, 4, 5):
            region.publish(section)
        for chunk in region.missing()[lane::2]:
            region.arrive(chunk)
    fetches = [
        Fetch(end, region, [Source(ends[1 - lane].addresses), source])
        for lane, (end, region) in enumerate(zip(ends, regions, strict=True))
    ]
    running = [Running(fetch) for fetch in fetches]
    for each, region in zip(running, regions, strict=True):
        each.done()
        assert same(there, region)


def test_a_wrong_section_comes_from_another_source_if_there_is_one(node: Node) -> None:
    good, bad, here = fill(make_region()), fill(make_region()), make_region()
    bad.memory[bad.sections[2].offset] ^= 1
    sources = [Source(node("bad", [bad]).addresses), Source(node("good", [good]).addresses, standby=True)]
    result = Fetch(node("target"), here, sources).run()
    assert same(good, here)
    assert result.num_bytes["good"] == good.sections[2].num_bytes


def test_a_section_that_comes_wrong_from_everybody_once_may_come_from_anybody_again(node: Node, wire: MakeWire) -> None:
    there, here = fill(make_region()), make_region()
    first, other = (wire(node(name, [there]), flips=[60_000]) for name in ("first", "other"))
    result = Fetch(node("target"), here, [Source((first.address,)), Source((other.address,), standby=True)]).run()
    assert same(there, here)
    assert (result.num_repaired, result.lost) == (2, ())


def test_a_section_that_came_wrong_comes_again_from_there_when_the_other_source_is_lost(node: Node, wire: MakeWire) -> None:
    there, here = fill(make_region()), make_region()
    first = wire(node("first", [there]), flips=[60_000])
    other = wire(node("other", [there]), breaks=[1, 2, 3])
    result = Fetch(node("target"), here, [Source((first.address,)), Source((other.address,), standby=True)]).run()
    assert same(there, here)
    assert (result.num_repaired, len(result.lost)) == (1, 1)


def test_what_is_wrong_everywhere_is_named_so(node: Node) -> None:
    bad = [fill(make_region()) for _ in range(2)]
    for each in bad:
        each.memory[each.sections[2].offset] ^= 1
    sources = [Source(node(name, [each]).addresses) for name, each in zip("ab", bad, strict=True)]
    with pytest.raises(TransferFailed, match=r"section 2 of weights came 4 times with a wrong checksum"):
        Fetch(node("target"), make_region(), sources).run()


def test_what_a_lost_source_owed_comes_from_another(node: Node, wire: MakeWire) -> None:
    there, here = fill(make_region()), make_region()
    lost = wire(node("lost", [there]), breaks=[100_000, 100_001, 100_002, 100_003])
    sources = [Source((lost.address,)), Source(node("other", [there]).addresses, standby=True)]
    Fetch(node("target"), here, sources).run()
    assert same(there, here)


def test_a_source_that_falls_silent_is_lost(node: Node, wire: MakeWire) -> None:
    there, here = fill(make_region()), make_region()
    silent = wire(node("silent", [there]), hangs=100_000)
    other = Source(node("other", [there]).addresses, standby=True)
    result = Fetch(node("target", patience_s=0.5), here, [Source((silent.address,)), other]).run()
    assert same(there, here)
    assert result.num_bytes["other"] > 0


def test_a_source_that_goes_before_it_knew_the_checksums_is_replaced(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bytes of a section are here, but whoever sent them is gone before it could say what they should be."""
    there, relay, here = fill(make_region()), make_region(), make_region()
    middle = node("middle", [relay])

    def gone(*_: object, **__: object) -> None:
        raise PeerLost("gone")

    sources = [Source(middle.addresses), Source(node("source", [there]).addresses, standby=True)]
    fetch = Fetch(node("target"), here, sources)
    monkeypatch.setattr(fetch, "_ask_sum", gone)
    running = Running(fetch)
    relay.memory[:] = there.memory
    for chunk in relay.missing():
        relay.arrive(chunk)
    running.done()
    assert same(there, here)


def test_without_a_source_left_it_fails_and_says_what_became_of_each(node: Node, wire: MakeWire) -> None:
    there, here = fill(make_region(), upto=2), make_region()
    source = node("source", [there])
    spoilt = wire(source, breaks=[100_000])
    running = Running(Fetch(node("target"), here, [Source((spoilt.address,))]))
    assert here.wait_verified(1, 10)  # what comes next is not there yet
    spoilt.close()
    with pytest.raises(TransferFailed, match=r"of weights is held by no source that is left: tcp://127\.0\.0\.1:\d+: cannot be"):
        running.done()
    assert 0 < len(here.missing()) < len(here.chunks)
    fill(there)
    Fetch(node("again"), here, [Source(source.addresses)]).run()  # goes on from there
    assert same(there, here)


def test_two_that_wait_for_each_other_notice_and_fail(node: Node) -> None:
    there, regions = fill(make_region(), upto=0), [make_region(), make_region()]
    for region in regions:
        region.expect(fill(make_region()).sums)
    one, two = node("one", [regions[0]]), node("two", [regions[1]])
    running = [Running(Fetch(one, regions[0], [Source(two.addresses)])), Running(Fetch(two, regions[1], [Source(one.addresses)]))]
    for each in running:
        with pytest.raises(TransferFailed, match="is held by no source that is left"):
            each.done()
    assert not there.complete


def test_two_whose_wrong_section_waits_for_the_others_chunk_notice(node: Node) -> None:
    """Each wants what the other has verified, and has itself what the other's section lacks."""
    there, regions = fill(make_region()), [make_region(), make_region()]
    source = Source(node("source", [there]).addresses, standby=True)
    ends = [node("one", [regions[0]]), node("two", [regions[1]])]
    fetches = [
        Fetch(end, region, [Source(ends[1 - at].addresses), source])
        for at, (end, region) in enumerate(zip(ends, regions, strict=True))
    ]
    for at, (region, fetch) in enumerate(zip(regions, fetches, strict=True)):
        region.expect(there.sums)
        region.memory[:] = there.memory
        for chunk in region.missing():
            if chunk != at:
                region.arrive(chunk)
        fetch._careful.add(0)
    for running, region in zip([Running(fetch) for fetch in fetches], regions, strict=True):
        running.done()
        assert same(there, region)


def test_two_who_have_lost_their_sources_and_wait_for_each_others_stripe_fail(node: Node) -> None:
    """What their own sources owed, nobody is ever asked for: all that is left are busy waiting."""
    regions = [make_region(), make_region()]
    ends = [node("one", [regions[0]]), node("two", [regions[1]])]
    running = []
    for at, region in enumerate(regions):
        sources = [Source(("tcp://127.0.0.1:1",), stripe=at), Source(ends[1 - at].addresses, stripe=1 - at)]
        running.append(Running(Fetch(ends[at], region, sources, stripes=2)))
    for each in running:
        with pytest.raises(TransferFailed, match=r"is held by no source that is left: .*127\.0\.0\.1:1: cannot be reached"):
            each.done()


def test_two_that_wait_for_each_other_go_on_when_a_third_has_it(node: Node) -> None:
    there, regions = fill(make_region()), [make_region(), make_region()]
    third = Source(node("third", [there]).addresses, standby=True)
    one, two = node("one", [regions[0]]), node("two", [regions[1]])
    running = [
        Running(Fetch(one, regions[0], [Source(two.addresses), third])),
        Running(Fetch(two, regions[1], [Source(one.addresses), third])),
    ]
    for each in running:
        each.done()
    assert all(same(there, region) for region in regions)


def test_who_has_failed_tells_those_who_wait_for_him(node: Node) -> None:
    regions = [make_region(), make_region()]
    middle = node("middle", [regions[0]])
    last = Running(Fetch(node("last"), regions[1], [Source(middle.addresses)]))
    regions[0].fail("the disk is gone")
    with pytest.raises(TransferFailed, match="the disk is gone"):
        last.done()


def test_a_source_may_join_later(node: Node) -> None:
    there, here = fill(make_region()), make_region()
    empty = node("empty", [make_region()])
    running = Running(Fetch(node("target"), here, [Source(empty.addresses)]))
    running.fetch.add(Source(node("full", [there]).addresses, standby=True))
    empty.close()
    running.done()
    assert same(there, here)


def test_a_source_that_joins_before_the_beginning_has_one_thread(node: Node) -> None:
    there, here = fill(make_region()), make_region()
    fetch = Fetch(node("target"), here, [])
    fetch.add(Source(node("full", [there]).addresses))
    assert fetch._threads == []
    Running(fetch).done()
    assert len(fetch._threads) == 1
    assert same(there, here)


def test_it_can_be_cancelled(node: Node) -> None:
    here = make_region()
    running = Running(Fetch(node("target"), here, [Source(node("empty", [make_region()]).addresses)]))
    running.fetch.cancel("the replica is not wanted any more")
    with pytest.raises(TransferFailed, match="not wanted any more"):
        running.done()


def test_it_has_a_deadline(node: Node) -> None:
    with pytest.raises(TransferFailed, match=r"did not arrive within 0\.1 s"):
        Fetch(node("target"), make_region(), [Source(node("empty", [make_region()]).addresses)], deadline_s=0.1).run()


def test_a_source_with_other_weights_of_the_same_shape_is_not_mixed_in(node: Node, wire: MakeWire) -> None:
    there, other, here = fill(make_region()), fill(make_region(), seed=1), make_region()
    lost = wire(node("lost", [there]), breaks=[100_000] * 8)
    sources = [Source((lost.address,)), Source(node("other", [other]).addresses, standby=True)]
    with pytest.raises(TransferFailed, match="it holds other weights under the same name"):
        Fetch(node("target"), here, sources).run()


def test_another_model_is_refused_and_both_sides_say_so(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    source = node("source", [fill(make_region(fingerprint="Llama in fp16"))])
    with pytest.raises(TransferFailed, match="source holds Llama in fp16; target wants a model"):
        Fetch(node("target"), make_region(), [Source(source.addresses)]).run()
    assert "source refused target: source holds Llama in fp16; target wants a model" in caplog.text


def test_plans_name_predecessors_first_and_sources_last() -> None:
    addresses = {name: (f"tcp://{name}:1",) for name in "STabc"}
    plan = chains(["S", "T"], ["a", "b", "c"], addresses)
    assert {name: [(each.addresses[0][6], each.standby) for each in sources] for name, sources in plan.items()} == {
        "a": [("S", False), ("T", True)],
        "b": [("T", False), ("S", True)],
        "c": [("a", False), ("S", True), ("T", True)],
    }
    with pytest.raises(ValueError, match="2 stripes need as many receivers on every host, not 1"):
        striped(["S", "T"], [["a"]], addresses)
