"""Fill a region from peers: one thread a source, chunk by chunk, in order, until every section matches its checksum.

A source may itself still be loading; what it does not have yet it passes on when it comes, so that a chain of peers is a
pipeline. When a source is lost, what has arrived stays, and what it owed goes to others at the chunk. Two peers that wait for
each other notice: every answer "not yet" names the nodes that it waits for. Knows no weights and no plan of who sends to whom.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from msgspec import Struct

from squall.errors import ConfigError, PeerLost, PeerRefused, SquallError, TransferFailed
from squall.live.transport.interface import Link, Transport
from squall.live.transport.region import Region

ATTEMPTS = 3
"""How often a section may arrive wrong from a source, and how often a source is dialled without one new chunk."""

WINDOW = 4
"""Chunks asked for ahead, so that a link never waits for a question."""

_TURNS = 2
"""Answers in a row in which we must find ourselves: one may be old."""

_ROUNDS = 10
"""How often all sources are asked for a checksum that none of them knows yet; each time one is given a moment to learn it."""

_PATIENCE_S = 1.0
"""For the threads of a fetch that is over."""

_PAUSE_S = 0.05
"""Before a source is dialled again."""


class Source(Struct, frozen=True):
    """A peer to fetch from.

    Attributes:
        addresses: of it, the best first; the first that can be dialled is used.
        stripe: it gives the chunks whose number modulo the number of stripes is this; any chunk when None.
        standby: it gives only what another could not.
    """

    addresses: tuple[str, ...]
    stripe: int | None = None
    standby: bool = False


class Fetched(Struct, frozen=True):
    """How a fetch went: bytes that came from each node, sections that had to come again, sources lost on the way."""

    num_bytes: dict[str, int]
    num_repaired: int
    lost: tuple[str, ...]


class _Lane:
    """One source, and what it is doing."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.address = source.addresses[0]
        self.peer = self.address
        self.link: Link | None = None
        self.asked: deque[int] = deque()
        self.path: tuple[str, ...] | None = None  # of nodes that its oldest chunk waits for; None: it comes
        self.turns = 0
        self.num_bytes = 0
        self.reason: str | None = None  # why it is of no more use


class Fetch:
    """One region, filled once. `run` in one thread, everything else from any.

    Args:
        transport: dials the sources.
        region: whose chunks are to arrive; those that have are not asked for again.
        sources: at least one; more may join with `add`.
        stripes: what `Source.stripe` counts modulo.
        deadline_s: after which it has failed; None waits as long as a source lives.
        arrived: told the number of each section that is verified, in a thread of the fetch.
    """

    def __init__(
        self,
        transport: Transport,
        region: Region,
        sources: Sequence[Source],
        *,
        stripes: int = 1,
        deadline_s: float | None = None,
        arrived: Callable[[int], None] | None = None,
    ) -> None:
        self._transport = transport
        self._region = region
        self._stripes = stripes
        self._deadline_s = deadline_s
        self._tell = arrived
        self._lanes = [_Lane(source) for source in sources]
        self._todo: list[deque[int]] = [deque() for _ in range(stripes)]
        self._orphans: list[int] = []  # in order
        self._owner: dict[int, _Lane] = {}
        self._barred: dict[int, set[_Lane]] = {}
        self._careful: set[int] = set()  # sections that came wrong: only what the source has verified is taken
        self._wrong: dict[int, int] = {}
        self._gave_wrong: dict[int, set[_Lane]] = {}  # by section: barred for it as long as somebody else may have it right
        self._open = len(region.sections)
        self._failure: str | None = None
        self._hopeless = self._refused = False
        self._begun = False
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()

    # -- from outside

    def run(self) -> Fetched:
        """Returns when every section is verified.

        Raises:
            PeerRefused: no source is left, and one of them refused us: trying them again would not help.
            TransferFailed: a section cannot be had, or came wrong again and again, or the deadline passed, or `cancel` was
                called. The region keeps what has arrived; a later fetch goes on from there.
        """
        region = self._region
        region.fail(None)
        for section in range(len(region.sections)):
            self._open -= region.verified(section)
        for chunk in region.missing():
            self._todo[chunk % self._stripes].append(chunk)
        region.upstream = self._upstream
        missing = {region.chunks[chunk].section for chunk in region.missing()}
        for section in range(len(region.sections)):
            if not region.verified(section) and section not in missing:
                self._complete(section, None)  # its bytes came in an earlier fetch, which ended before it could look at them
        with self._changed:
            self._begun = True
            lanes = list(self._lanes)
        for lane in lanes:
            self._start(lane)
        with self._changed:
            if not self._changed.wait_for(lambda: self._failure is not None or self._open == 0, self._deadline_s):
                self._fail(f"it did not arrive within {self._deadline_s:g} s")
        self._hang_up()
        for thread in self._threads:
            thread.join(_PATIENCE_S)  # what one of them still writes would be written into the next fetch
        if self._failure is not None:
            region.fail(self._failure)
            raise (PeerRefused if self._hopeless and self._refused else TransferFailed)(self._failure)
        region.upstream = lambda _: ()
        return Fetched(
            {lane.peer: lane.num_bytes for lane in self._lanes if lane.num_bytes},
            sum(self._wrong.values()),
            tuple(lane.reason for lane in self._lanes if lane.reason is not None),
        )

    def add(self, source: Source) -> None:
        """One more source, from now on, or from the beginning."""
        lane = _Lane(source)
        with self._changed:
            self._lanes.append(lane)
            begun = self._begun
        if begun:
            self._start(lane)

    def cancel(self, reason: str = "it was cancelled") -> None:
        """End it; `run` raises."""
        with self._changed:
            self._fail(reason)
        self._hang_up()

    # -- who gives what; all under the lock

    def _next(self, lane: _Lane) -> int | None:
        """The next chunk that `lane` should ask for."""
        source = lane.source
        if not source.standby:
            stripes = self._todo if source.stripe is None else [self._todo[source.stripe]]
            mine = min((stripe for stripe in stripes if stripe), key=lambda stripe: stripe[0], default=None)
            if mine is not None:
                return mine.popleft()
        return next((chunk for chunk in self._orphans if lane not in self._barred.get(chunk, ())), None)

    def _take(self, lane: _Lane, *, block: bool) -> int | None:
        """Claim a chunk; None when there is none for this lane now, or (having waited) ever."""
        with self._changed:
            while self._failure is None and self._open and lane.reason is None:
                chunk = self._next(lane)
                if chunk is not None:
                    if chunk in self._orphans:
                        self._orphans.remove(chunk)
                    self._owner[chunk] = lane
                    lane.asked.append(chunk)
                    return chunk
                if not block:
                    return None
                self._changed.wait()
            return None

    def _give_back(self, lane: _Lane) -> None:
        """What a lane did not give, and what only it was to give, others may give: it may be long in coming back."""
        self._orphans = sorted({*self._orphans, *lane.asked})
        for stripe, chunks in enumerate(self._todo):
            if chunks and not any(other is not lane and self._serves(other, stripe) for other in self._lanes):
                self._orphans = sorted({*self._orphans, *chunks})
                chunks.clear()
        for chunk in lane.asked:
            self._owner.pop(chunk, None)
        lane.asked.clear()
        lane.path, lane.turns = None, 0
        self._changed.notify_all()

    def _end_lane(self, lane: _Lane, reason: str) -> None:
        lane.reason = reason
        self._give_back(lane)
        self._see_whether_hopeless()

    def _serves(self, lane: _Lane, stripe: int) -> bool:
        return lane.reason is None and not lane.source.standby and lane.source.stripe in (None, stripe)

    def _see_whether_hopeless(self) -> None:
        living = [lane for lane in self._lanes if lane.reason is None]
        for chunk in self._orphans:
            barred, section = self._barred.get(chunk, set()), self._region.chunks[chunk].section
            if all(lane in barred for lane in living):
                if again := self._gave_wrong.get(section, set()).intersection(living):
                    barred -= again
                    continue
                name = self._region.sections[section].name
                reasons = "; ".join(lane.reason for lane in self._lanes if lane.reason is not None)
                self._hopeless = True
                self._fail(f"{name} of {self._region.name} is held by no source that is left: {reasons or 'all wait for us'}")
                return
        self._changed.notify_all()

    def _fail(self, reason: str) -> None:
        if self._failure is None and self._open:
            self._failure = reason
        self._changed.notify_all()

    def _upstream(self, chunk: int) -> tuple[str, ...]:
        """Whom a chunk waits for; one that nobody was asked for yet, once all who may give it wait: whom they have in common."""
        with self._changed:
            owner = None if chunk in self._orphans else self._owner.get(chunk)
            able = [lane for lane in self._lanes if self._may_give(lane, chunk)] if owner is None else [owner]
            if not able or (owner is None and any(lane.path is None for lane in able)):
                return ()
            first, *others = [(lane.peer, *(lane.path or ())) for lane in able]
            return tuple(node for node in first if all(node in path for path in others))

    def _may_give(self, lane: _Lane, chunk: int) -> bool:
        if chunk in self._orphans:
            return lane.reason is None and lane not in self._barred.get(chunk, ())
        return self._serves(lane, chunk % self._stripes)

    def _hang_up(self) -> None:
        with self._changed:
            lanes = list(self._lanes)
            self._changed.notify_all()
        for lane in lanes:
            if lane.link is not None:
                lane.link.interrupt()

    # -- a lane's thread

    def _start(self, lane: _Lane) -> None:
        thread = threading.Thread(target=self._work, args=(lane,), name=f"fetch-{lane.address}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self, lane: _Lane) -> None:
        """Dial, fetch, and after a break dial again, for as long as something comes of it."""
        fruitless, reason = 0, ""
        while fruitless < ATTEMPTS and self._wanted(lane):
            before = lane.num_bytes
            try:
                if self._take(lane, block=True) is None:
                    return
                self._dial(lane)
                self._pull(lane)
                return
            except PeerLost as error:
                reason = str(error)
                fruitless = 0 if lane.num_bytes > before else fruitless + 1
            except SquallError as error:
                reason, fruitless = str(error), ATTEMPTS
                self._refused |= isinstance(error, PeerRefused | ConfigError)
            except Exception as error:
                self.cancel(f"{type(error).__name__}: {error}")
                raise
            finally:
                if lane.link is not None:
                    lane.link.close()
            with self._changed:
                self._give_back(lane)
                self._see_whether_hopeless()
            time.sleep(_PAUSE_S)
        with self._changed:
            if self._failure is None and self._open and lane.reason is None:
                self._end_lane(lane, reason)

    def _wanted(self, lane: _Lane) -> bool:
        return self._failure is None and self._open > 0 and lane.reason is None

    def _dial(self, lane: _Lane) -> None:
        """The best address that answers. Chunks claimed before are asked for now."""
        for last, address in enumerate(lane.source.addresses, 1 - len(lane.source.addresses)):
            try:
                lane.link = link = self._transport.connect(address)
                break
            except (PeerLost, ConfigError):
                if last == 0:
                    raise
        lane.address, lane.peer = address, link.peer
        self._region.expect(link.open(self._region.name, self._region.fingerprint, self._region))
        for chunk in lane.asked:
            self._ask(link, chunk)

    def _pull(self, lane: _Lane) -> None:
        link = lane.link
        assert link is not None
        while self._wanted(lane):
            while len(lane.asked) < WINDOW and (chunk := self._take(lane, block=not lane.asked)) is not None:
                self._ask(link, chunk)
            if not lane.asked:
                return
            self._receive(lane, link)

    def _ask(self, link: Link, chunk: int) -> None:
        place = self._region.chunks[chunk]
        link.ask(self._region.name, [(place.offset, place.num_bytes)], verified=place.section in self._careful)

    def _receive(self, lane: _Lane, link: Link) -> None:
        """The oldest chunk asked for, or the news that it is still to come."""
        chunk = lane.asked[0]
        place = self._region.chunks[chunk]
        path = link.take(self._region.name, [(place.offset, place.num_bytes)], self._region)
        if path is not None:
            self._wait(lane, chunk, path)
            return
        with self._changed:
            lane.asked.popleft()
            lane.path, lane.turns = None, 0
            lane.num_bytes += place.num_bytes
        if self._region.arrive(chunk):
            self._complete(place.section, lane)

    def _wait(self, lane: _Lane, chunk: int, path: tuple[str, ...]) -> None:
        lane.path = path
        lane.turns = lane.turns + 1 if self._transport.node in path else 0
        if lane.turns >= _TURNS:
            with self._changed:
                self._barred.setdefault(chunk, set()).add(lane)
            raise PeerLost(f"{lane.address}: waits for us")

    def _complete(self, section: int, lane: _Lane | None) -> None:
        """All chunks of a section are here: it is right, or has to come again."""
        name = self._region.sections[section].name
        if lane is not None and name not in self._region.sums:
            try:
                self._learn(lane, name)
            except SquallError:  # the lane goes, and nobody is left who could vouch for these bytes
                with self._changed:
                    if self._failure is not None:
                        raise  # they stay as they are: the region may be another fetch's by now
                    self._region.discard(section)
                    self._orphans = sorted({*self._orphans, *self._region.chunks_of(section)})
                raise
        good = self._region.accept(section)
        with self._changed:
            if good:
                self._open -= 1
                self._changed.notify_all()
            else:
                self._again(section, name)
        if good and self._tell is not None:
            self._tell(section)

    def _again(self, section: int, name: str) -> None:
        """Another source first, if there is one; what comes now must have been verified by its sender."""
        chunks = self._region.chunks_of(section)
        self._wrong[section] = self._wrong.get(section, 0) + 1
        self._careful.add(section)
        givers = {lane for chunk in chunks if (lane := self._owner.get(chunk)) is not None}
        if self._wrong[section] > ATTEMPTS:
            self._fail(f"{name} of {self._region.name} came {self._wrong[section]} times with a wrong checksum")
        self._gave_wrong.setdefault(section, set()).update(givers)
        for chunk in chunks:
            self._barred.setdefault(chunk, set()).update(givers)
        self._orphans = sorted({*self._orphans, *chunks})
        self._see_whether_hopeless()

    def _learn(self, lane: _Lane, section: str) -> None:
        """The checksum of a section that those did not know who gave it, when we dialled them.

        Whoever gave the last of it may wait for the same word, from us even: so all are asked, those first who need not be waited
        for. Raises SquallError where it cannot be had.
        """
        for _ in range(_ROUNDS):
            with self._changed:
                others = [other for other in self._lanes if other is not lane and other.reason is None]
            turns = [(lane, False), *((other, False) for other in others), (lane, True)]
            errors: list[SquallError] = []
            for asked, waits in turns:
                if not self._wanted(lane):
                    raise TransferFailed(self._failure or "the fetch is over")
                try:
                    self._ask_sum(asked, section, waits=waits)
                except SquallError as error:
                    errors.append(error)
                if section in self._region.sums:
                    return
            if len(errors) == len(turns):
                raise errors[0]
        raise PeerLost(f"{lane.address}: nobody knows the checksum of {section}")

    def _ask_sum(self, lane: _Lane, section: str, *, waits: bool) -> None:
        """Take over what a source knows by now: on a link of its own, as the other has questions under way."""
        link = self._transport.connect(lane.address)
        try:
            self._region.expect(link.open(self._region.name, self._region.fingerprint))
            if waits and section not in self._region.sums and (value := link.checksum(self._region.name, section)) is not None:
                self._region.expect({section: value})
        finally:
            link.close()
