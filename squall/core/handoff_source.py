"""The source's part in hand-offs: requests whose KV waits to leave a replica, or is on its way.

A request is held with its blocks until their content has been sent to whoever asked for it, one at a time, or until it decodes
here after all. Blocks become free at the next boundary. Knows no pool, no route and no link.
"""

from __future__ import annotations

from squall.core.actions import AnyAction, Send, SendKv
from squall.core.decodes import Work
from squall.core.events import HandoffFailed, Held, Kept, KvArrived, KvFailed, KvSent, KvWanted
from squall.core.types import ROUTER, ReplicaId, RequestId


class HeldWork:
    """A request held here.

    Attributes:
        sending: what is being sent of it; only one at a time.
        wanted: what comes after that, or at once.
        gone: its client went away; `silent`: and nobody is to be told, since another part of its KV is lost.
        stays: it decodes here where what is being sent of it does not arrive.
        whole: all layers are here.
        anew: the request has begun here once more, for which the engine forgot what is held.
    """

    __slots__ = ("anew", "gone", "sending", "silent", "stays", "wanted", "whole", "work")

    def __init__(self, work: Work, whole: bool) -> None:
        self.work = work
        self.whole = whole
        self.sending: KvWanted | None = None
        self.wanted: KvWanted | None = None
        self.gone = False
        self.silent = False
        self.stays = False
        self.anew = False

    @property
    def is_asked_for(self) -> bool:
        return self.sending is not None or self.wanted is not None


class NextBoundary:
    """Between two runs.

    Attributes:
        awaited: something waits for it that it could change.
    """

    __slots__ = ("awaited",)

    def __init__(self) -> None:
        self.awaited = False


class HandoffSource:
    """See the module.

    Args:
        id: the replica.
        next_boundary: its own.

    Attributes:
        held: requests that wait here, or are being sent.
        just_held: since the last boundary; the router hears of them there.
        leaving: whose blocks become free at the next boundary.
        staying: who decodes here after all, for the target's part to seat.
    """

    __slots__ = ("_disowned", "_id", "_next", "held", "just_held", "leaving", "staying")

    def __init__(self, id: ReplicaId, next_boundary: NextBoundary) -> None:
        self._id = id
        self.held: dict[RequestId, HeldWork] = {}
        self.just_held: list[Held] = []
        self.leaving: list[HeldWork] = []
        self.staying: list[Work] = []
        self._next = next_boundary
        self._disowned: list[HeldWork] = []  # of no use, but still read from

    @property
    def num_held(self) -> int:
        return len(self.held) + len(self._disowned)

    def hold(self, work: Work, head: ReplicaId | None = None, num_layers: int = 0) -> None:
        """It is in no batch and keeps its blocks. The KV of its first `num_layers` layers may be at another replica, `head`."""
        request = work.request.id
        self.held[request] = HeldWork(work, head is None)
        self.just_held.append(Held(request, work.target, head, num_layers))

    def hold_part(self, work: Work) -> None:
        """The KV of its first layers is here, and the replica that has the others tells the router."""
        self.held[work.request.id] = HeldWork(work, whole=False)

    # -- events

    def want(self, event: KvWanted) -> list[AnyAction]:
        held = self.held.get(event.request)
        if held is None or held.gone:
            return [failed(event)]
        held.wanted = event
        return [] if held.sending is not None else self._start(held)

    def _start(self, held: HeldWork) -> list[AnyAction]:
        wanted, held.wanted = held.wanted, None
        held.sending = wanted
        if wanted is None:
            return []
        return [SendKv(wanted.request, wanted.to, wanted.first_layer, wanted.last_layer, held.work.target)]

    def sent(self, event: KvSent) -> list[AnyAction]:
        if self._disowned and (ended := self._end_disowned(event.request, event.to)) is not None:
            return [ended]
        held = self.held.get(event.request)
        if held is None or held.sending is None or held.sending.to != event.to:
            return []  # of a process before this one
        sent, held.sending = held.sending, None
        self._leave(held)
        if held.gone:
            return [failed(sent)]
        return [Send(sent.to, KvArrived(sent.request, sent.first_layer, sent.last_layer))]

    def fail(self, event: KvFailed) -> list[AnyAction]:
        if self._disowned and (ended := self._end_disowned(event.request, event.to)) is not None:
            return [ended]
        held = self.held.get(event.request)
        if held is None or held.sending is None or held.sending.to != event.to:
            return []
        lost, held.sending = held.sending, None
        if held.gone:
            self._leave(held)
            return [failed(lost)]
        if held.stays and held.wanted is None:
            return [failed(lost), *self._stay([held])]
        return [failed(lost), Send(ROUTER, HandoffFailed(self._id, lost.request, lost.to)), *self._start(held)]

    def cancel(self, held: HeldWork) -> None:
        """Nobody wants it any more."""
        held.gone = True
        if held.sending is None:
            self._leave(held)

    def drop(self, request: RequestId, by: ReplicaId) -> bool:
        """That replica, which may have asked for it, is gone. What is being sent to it ends by itself.

        False where there is nothing of the request whose end the router would hear of.
        """
        held = self.held.get(request)
        if held is None:
            return any(going.work.request.id == request and going.gone and not going.silent for going in self.leaving)
        if held.wanted is not None and held.wanted.to == by:
            held.wanted = None
        return True

    def begin_anew(self, request: RequestId) -> None:
        """It comes to be computed here once more."""
        if self.leaving or self._disowned:
            for held in (*self.leaving, *self._disowned):
                held.anew |= held.work.request.id == request

    def disown(self, request: RequestId) -> None:
        """The rest of its KV is lost: what is here is of no use."""
        held = self.held.get(request)
        if held is None:
            return
        held.gone = held.silent = True
        if held.sending is None:
            self._leave(held)
        else:  # it may be held once more before that has ended
            del self.held[request]
            self._disowned.append(held)

    def _end_disowned(self, request: RequestId, to: ReplicaId) -> Send | None:
        """Nothing is read from its blocks any more; None where nobody who was disowned was on the way there.

        The receiver has not asked for anything of the request since: it waits for this answer.
        """
        for held in self._disowned:
            sent = held.sending
            if sent is not None and sent.request == request and sent.to == to:
                self._disowned.remove(held)
                self.leaving.append(held)
                self._next.awaited = True
                return failed(sent)
        return None

    def _leave(self, held: HeldWork) -> None:
        """Its blocks become free when the run ends."""
        del self.held[held.work.request.id]
        self.leaving.append(held)
        self._next.awaited = True

    # -- those that decode here after all

    def keep(self, requests: tuple[RequestId, ...]) -> list[AnyAction]:
        """Nobody else takes these: they decode here; of what is still being sent, what does not arrive."""
        found = [held for request in requests if (held := self.held.get(request)) is not None and not held.gone]
        for held in found:
            held.stays = held.whole
        return self._stay([held for held in found if held.whole and not held.is_asked_for])

    def keep_all(self) -> list[AnyAction]:
        """The replica decodes from now on: what is here needs no copy, nor another way where the one that it is on fails."""
        return self.keep(tuple(self.held))

    def _stay(self, some: list[HeldWork]) -> list[AnyAction]:
        if not some:
            return []
        for held in some:
            del self.held[held.work.request.id]
            self.staying.append(held.work)
        self._next.awaited = True
        return [Send(ROUTER, Kept(self._id, tuple(held.work.request.id for held in some)))]


def failed(wanted: KvWanted) -> Send:
    """What has been asked for does not come."""
    return Send(wanted.to, KvFailed(wanted.request, wanted.to, wanted.first_layer, wanted.last_layer))
