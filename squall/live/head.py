"""The head: Router and Controller in the live driver, and one session a replica.

Implements `Frontend`. Knows requests, replicas and what each action means in this world; not HTTP, not how a worker computes.
A request's tokens stay here (`streams`), so that it can go on at another replica when its own dies: the client sees nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from squall.config import Config
from squall.core.actions import (
    AnyAction,
    Decided,
    LoadWeights,
    Reply,
    Send,
    StartReplica,
    StopReplica,
    TellNeighbours,
    WarmReplica,
)
from squall.core.controller import Controller
from squall.core.events import (
    AnyEvent,
    Arrived,
    Cancelled,
    DrainWanted,
    HandedOver,
    LivePaired,
    LoadFailed,
    NodeDown,
    NodeUp,
    Offered,
    Progressed,
    ReplicaLost,
    ReplicaStopped,
    ScaleWanted,
    Submitted,
    Surrendered,
    TakenOver,
    Unpaired,
)
from squall.core.fleet_plan import FleetPlan
from squall.core.lifecycle import Phase
from squall.core.metrics import Decision, Delivery
from squall.core.types import CONTROLLER, ROUTER, MachineId, Nanos, ReplicaId, Request, RequestId, Role
from squall.deployment import plain_plan, router_of
from squall.errors import ConfigError
from squall.eventlog import EventLog
from squall.live.activations import ActivationsOffer
from squall.live.driver import Driver, Priority
from squall.live.engine.interface import Job, Sampling, TokenOut
from squall.live.engine.tokenizer import Tokenizer
from squall.live.fleet_book import FleetBook
from squall.live.frontend import FleetStatus, FrontendStats
from squall.live.gauges import Gauges
from squall.live.launch import Launcher
from squall.live.rpc.client import SILENCE_S, ReplicaClient
from squall.live.rpc.convert import Peer, ReplicaLoad, WeightsMoved
from squall.live.sessions import Sessions
from squall.live.stream import Stream
from squall.live.streams import Streams
from squall.live.transport.kv import KvOffer
from squall.quantities import counted


class Head:
    """See `Frontend`; also the performer of the Router's and the Controller's actions.

    Args:
        config: as given.
        model_names, tokenizer, max_model_len: as in `Frontend`.
        launcher: starts workers.
        log: of events and actions; None writes none.
        say: tells a person what happens to replicas, one line each.
        silence_s: after how much silence a replica counts as lost.
        plan: what the fleet stands on; the configuration's bounds and nothing else when None.

    Attributes:
        neighbours: the heads of other models, whose fleets share the cluster.
    """

    def __init__(
        self,
        config: Config,
        model_names: Sequence[str],
        tokenizer: Tokenizer,
        max_model_len: int,
        launcher: Launcher,
        log: EventLog | None = None,
        say: Callable[[str], None] = lambda _: None,
        silence_s: float = SILENCE_S,
        plan: FleetPlan | None = None,
    ) -> None:
        self.model_names = tuple(model_names)
        self.created = int(time.time())
        self.max_model_len = max_model_len
        self.tokenizer = tokenizer
        self.draining = False
        self.load_failure: asyncio.Future[str] | None = None
        self.neighbours: Sequence[Head] = ()
        self._sessions = Sessions(launcher, self, silence_s)
        self._log = log
        self._say = say
        block_size = config.replica.block_size if getattr(config.batching, "prefix_cache", False) else None
        self._streams = Streams(max_model_len, block_size, self._give_up)
        plan = plan or plain_plan(config)
        self._router = router_of(config, plan.is_elastic)
        self._controller = Controller(plan, config.scale, config.load)
        self._controller.traffic = self._router
        self._book = FleetBook(self._controller)
        self._gauges = Gauges(self._controller, self._book)
        self._began_at: Nanos | None = None
        self._driver = Driver(
            {ROUTER: self._router, CONTROLLER: self._controller}, self._perform, log.record if log else None, after=self._look
        )
        self._pairs: dict[ReplicaId, ReplicaId] = {}  # the source of each target (live scaling)
        self._missed: set[ReplicaId] = set()  # of whose end a person was told
        self._looked = asyncio.Event()
        self._may_rest = all(bounds.minimum == 0 for bounds in plan.bounds.values())
        self._wakes = self._may_rest and all(bounds.initial == 0 for bounds in plan.bounds.values())

    # -- for whoever runs it

    def start(self) -> None:
        """Bring the fleet up."""
        if self._log is not None:
            for id, machine in ((ROUTER, self._router), (CONTROLLER, self._controller)):
                self._log.created(time.monotonic_ns(), id, machine)
        self.load_failure = asyncio.get_running_loop().create_future()
        self._driver.start()

    async def until_ready(self) -> None:
        """Returns when the first replica takes requests, or a fleet that begins at rest may be woken."""
        await self._until(lambda: self.ready)

    @property
    def failed(self) -> bool:
        """A bug stopped the machines: nothing is decided any more. Its traceback went to the loop's exception handler."""
        return self._driver.failed

    def hear(self, event: AnyEvent) -> None:
        """What the controller of another model says, before anything else reaches ours."""
        self._driver.hear(CONTROLLER, event)

    def want(self, role: Role, count: int | None) -> None:
        if role not in self._controller.states:
            known = ", ".join(known.value for known in self._controller.states)
            raise ConfigError(f"the fleet has no role {role.value!r}; it has {known}")
        self._driver.post(CONTROLLER, ScaleWanted(role, count), Priority.ARRIVAL)

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, finish what runs (for at most so long), and bring the fleet down."""
        self.draining = True
        self._driver.post(CONTROLLER, DrainWanted(), Priority.ARRIVAL)
        try:
            await asyncio.wait_for(self._until(lambda: self._fleet_is_off), timeout_s)
        except TimeoutError:
            self._say(f"not finished within {timeout_s:g} s: {counted(len(self._streams), 'request')}")

    async def close(self) -> None:
        """End everything now; streams that are open fail."""
        self._driver.stop()
        self._streams.fail_all("the service was shut down before the request was finished")
        await self._sessions.close()

    # -- Frontend

    @property
    def ready(self) -> bool:
        """A replica takes requests; or there is none because nobody asks, and whoever does wakes the fleet.

        Were a fleet at rest not ready, no load balancer would send it the request that wakes it.
        """
        return self._router.num_open > 0 or self._wakes

    def submit(self, prompt: Sequence[int], sampling: Sampling, *, session: int = 0) -> Stream:
        stream = self._streams.open(prompt, sampling, session)
        self._driver.post(ROUTER, Arrived(stream.request), Priority.ARRIVAL)
        self._fail_where_nobody_decides()
        return stream

    def stats(self) -> FrontendStats:
        return self._gauges.stats(self._router.num_queued)

    def fleet(self) -> FleetStatus:
        return self._book.status()

    @property
    def decisions(self) -> Sequence[Decision]:
        """All that the controller took, for the run directory; `weights`: that came to replicas."""
        return self._book.decisions

    @property
    def weights(self) -> Sequence[Delivery]:
        return self._book.weights

    # -- actions

    def _perform(self, action: AnyAction) -> None:
        match action:
            case Send(to, Submitted(request)):
                self._submit_to(to, request)
            case Send(to, Offered()):
                self._offer_to(to, action.event)
            case Send(to, event):
                self._follow_pairs(event)
                self._sessions.send(to, event)
            case Reply():
                self._streams.reject(action)
            case StartReplica(replica):
                self._began_at = self._began_at or self._driver.now
                self._sessions.start(replica, settled=self._began_at == self._driver.now)
            case LoadWeights():
                self._book.hold(action)
                self._release_loads()
            case WarmReplica(replica):
                self._sessions.send(replica, action)
            case StopReplica(replica):
                self._sessions.stop(replica)
            case TellNeighbours(event):
                for head in self.neighbours:
                    head.hear(event)
            case Decided(role, before, after, why):
                self._book.decided(action)
                self._say(f"{role.value}: {before} -> {after} replicas: {why}")
            case _:
                raise TypeError(f"the head cannot perform {type(action).__name__}")

    def _submit_to(self, replica: ReplicaId, request: Request) -> None:
        """Attach what machines never see. A request whose client has all it wants is over, whatever the router still believes."""
        stream = self._streams.get(request.id)
        if stream is None:
            self._driver.post(ROUTER, Progressed(replica, finished=(request.id,)), Priority.END)
            return
        stream.sent(replica, self._driver.now)
        continued = replace(request, num_output_tokens=len(stream.output))
        if client := self._sessions.get(replica):
            client.send(Submitted(continued), stream.job)

    def _offer_to(self, replica: ReplicaId, event: AnyEvent) -> None:
        """With the tokens so far, as the replica goes on from them. It shares no prefixes of what it has not computed itself.

        Where the client is gone, the router is about to call it off.
        """
        assert isinstance(event, Offered)
        stream, client = self._streams.get(event.request.id), self._sessions.get(replica)
        if stream is not None and client is not None:
            client.send(event, replace(stream.job, block_hashes=()))

    def _give_up(self, request: RequestId) -> None:
        """A client went away."""
        self._driver.post(ROUTER, Cancelled(request), Priority.ARRIVAL)

    def _release_loads(self) -> None:
        """Give the orders for weights whose givers can be reached by now."""
        for action, peers in self._book.released(self._sessions.wanted):
            if client := self._sessions.get(action.replica):
                client.send(action, peers=peers)

    # -- what its sessions say (see `Keeper`)

    def gone(self, replica: ReplicaId) -> None:
        self._book.gone(replica)
        self._gauges.gone(replica)

    def over(self, event: ReplicaLost | ReplicaStopped, *, said: bool = False) -> None:
        if isinstance(event, ReplicaLost) and not said:
            self._miss(event.replica, f"is lost: {event.reason}")
        self._driver.post(CONTROLLER, event, Priority.END)
        self._release_loads()

    def cannot_serve(self, why: str) -> None:
        """Before anything ran, what is wrong is the user's to put right."""
        if not self._router.num_open and self.load_failure is not None and not self.load_failure.done():
            self.load_failure.set_result(why)

    def _miss(self, replica: ReplicaId, what: str) -> None:
        self._missed.add(replica)
        self._say(f"replica {replica} {what}")

    def _welcome_back(self) -> None:
        """Whoever read that a replica was lost reads that it serves again."""
        back = {replica for replica in self._missed if self._controller.fleet[replica].phase is Phase.READY}
        for replica in sorted(back):
            self._say(f"replica {replica} serves again")
        self._missed -= back

    # -- what a launcher of many hosts says (see `Watch`)

    def host_out(self, host: int) -> None:
        self._driver.post(CONTROLLER, NodeDown(host, self._driver.now), Priority.END)

    def host_back(self, host: int) -> None:
        self._driver.post(CONTROLLER, NodeUp(host), Priority.END)

    def no_host(self, why: str) -> None:
        self.cannot_serve(why)

    # -- what replicas say

    def heard(self, client: ReplicaClient, to: MachineId, event: AnyEvent) -> None:
        if not self._sessions.holds(client):
            return
        if to >= 0:  # another replica
            self._follow_pairs(event)
            self._sessions.send(to, event)
            return
        match event:
            case TakenOver():
                return  # the router heard of it when the batch went by
            case Progressed():
                self._gauges.num_preemptions += len(event.preempted)
                self._streams.fail(event.finished, f"replica {client.replica} ended the request without a last token")
            case LoadFailed(_, reason):
                self._book.num_failed_loads += 1
                self._miss(client.replica, f"cannot load the model: {reason}")
                self.cannot_serve(reason)
            case ReplicaLost(_, reason):
                self._sessions.will_end(client.replica, reason)
                return  # the session ends with it, and its end is what the controller hears of, once
            case ReplicaStopped():
                return  # the same
        self._driver.post(to, event, Priority.END if to == CONTROLLER else Priority.MESSAGE)

    def handed_over(self, client: ReplicaClient, to: MachineId, event: HandedOver, jobs: Sequence[Job]) -> None:
        """A batch changes hands. The router hears of it now: later words of either replica, or their loss, come after it.

        Where the pair has ended meanwhile nobody takes it, and its requests begin anew.
        """
        if not self._sessions.holds(client):
            return
        requests = tuple(sorted(request.id for request in event.requests))
        receiver = self._sessions.get(to)
        if receiver is None or self._pairs.get(event.target) != to:
            self._driver.post(ROUTER, Surrendered(event.target, requests), Priority.END)
            return
        receiver.send(event, jobs=jobs)
        self._driver.post(ROUTER, TakenOver(to, event.target, requests), Priority.END)

    def _follow_pairs(self, event: AnyEvent) -> None:
        match event:
            case LivePaired(target, source):
                self._pairs[target] = source
            case Unpaired(target):
                self._pairs.pop(target, None)

    def tokens(self, client: ReplicaClient, tokens: Sequence[TokenOut]) -> None:
        if self._sessions.holds(client):
            self._streams.push(tokens, client.replica)

    def begun(self, client: ReplicaClient, requests: Sequence[RequestId]) -> None:
        if self._sessions.holds(client):
            self._streams.begun(requests)

    def reachable(self, client: ReplicaClient, peer: Peer) -> None:
        if self._sessions.holds(client):
            self._book.reachable(peer)
            self._release_loads()

    def moved(self, client: ReplicaClient, moved: WeightsMoved) -> None:
        if self._sessions.holds(client):
            self._book.moved(client.replica, moved)

    def offered(self, client: ReplicaClient, offer: KvOffer | ActivationsOffer) -> None:
        if self._sessions.holds(client) and (receiver := self._sessions.get(offer.to)):
            receiver.hand_on(offer)

    def load(self, client: ReplicaClient, load: ReplicaLoad) -> None:
        if self._sessions.holds(client):
            self._gauges.say(client.replica, load)
            if self._log is not None:
                self._log.flush()

    # -- waiting

    @property
    def _fleet_is_off(self) -> bool:
        return all(member.life.phase is Phase.OFF for member in self._controller.fleet.values())

    def _look(self) -> None:
        """The machines have taken in an instant's events."""
        if self._may_rest and not self._wakes:  # it has been up, or is at rest before it ever was
            self._wakes = self._router.num_open > 0 or not any(state.target for state in self._controller.states.values())
        self._welcome_back()
        self._fail_where_nobody_decides()
        self._looked.set()

    def _fail_where_nobody_decides(self) -> None:
        """Nobody may wait for what a machine that has failed would have said."""
        if self._driver.failed:
            self._streams.fail_all("a bug stopped the head, which decides nothing any more")

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._looked.clear()
            await self._looked.wait()
