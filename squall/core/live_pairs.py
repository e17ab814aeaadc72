"""Live pairs, as the controller sees them: which loading replica relieves which overloaded one, and who has to hear of what.

A pair begins with a load that names a partner and ends when the target says so, or one of the two is gone. Knows no request, no
batch and no layer but those that arrive.
"""

from __future__ import annotations

from squall.core.actions import AnyAction, Send
from squall.core.events import LayerArrived, LivePaired, ReplicaDown, ReplicaUp, RoleChanged, Unpaired, Warmed, WeightsLoaded
from squall.core.fleet import Fleet, Member
from squall.core.lifecycle import Phase
from squall.core.types import ROUTER, ReplicaId, Role


class LivePairs:
    """See the module.

    Args:
        fleet: its replicas.
        num_layers: of the model; 0: replicas cannot run single layers, and no pair is made.
    """

    def __init__(self, fleet: Fleet, num_layers: int) -> None:
        self._fleet = fleet
        self._num_layers = num_layers
        self._source: dict[ReplicaId, ReplicaId] = {}  # of each target
        self._target: dict[ReplicaId, ReplicaId] = {}  # of each source
        self._alone: set[ReplicaId] = set()  # targets that have lost their source, and still give back what they cannot serve

    def concerns(self, member: Member) -> bool:
        """It is one of a pair, or a target that has lost its source and has not yet given back what it cannot serve."""
        replica = member.replica
        return replica in self._source or replica in self._target or replica in self._alone

    def begin(self, member: Member) -> list[AnyAction]:
        """A load of the member's begins. The last of a path has nobody to send to, and works meanwhile."""
        transfer = member.source
        if not self._num_layers or transfer is None or transfer.live_partner is None or member.replica != transfer.path[-1]:
            return []
        partner = self._fleet.members.get(transfer.live_partner)
        if partner is None or not self.can_be_relieved(partner) or partner.role is not member.role or self.concerns(member):
            return []
        self._source[member.replica] = partner.replica
        self._target[partner.replica] = member.replica
        paired = LivePaired(member.replica, partner.replica, self._num_layers)
        member.announced = True
        member.num_blocks, member.block_size = partner.num_blocks, partner.block_size
        up = ReplicaUp(member.replica, partner.num_blocks, partner.block_size, member.role, partner.replica)
        role = RoleChanged(member.replica, member.role)
        told: list[AnyAction] = [] if member.role is Role.BOTH else [Send(member.replica, role)]
        return [*told, Send(member.replica, paired), Send(partner.replica, paired), Send(ROUTER, up)]

    def can_be_relieved(self, member: Member) -> bool:
        """It takes prompts, and nobody shares them with it."""
        here = member.phase is Phase.READY and member.announced and not member.stopping and member.leaves_at is None
        return here and member.role is not Role.DECODE and not self.concerns(member)

    def tell(self, event: LayerArrived | WeightsLoaded | Warmed) -> list[AnyAction]:
        """A target hears how far its weights are."""
        return [Send(event.replica, event)] if event.replica in self._source else []

    def is_alone(self, member: Member) -> bool:
        """It has lost its source and is not to be announced before it has said so."""
        return member.replica in self._alone

    def end(self, event: Unpaired) -> list[AnyAction]:
        """The target says that nothing is left to share; or that it works alone now, and what it has given back is on its way.

        It may have said the former before it heard that its source is lost, and says nothing more then.
        """
        if event.target in self._alone:
            self._alone.discard(event.target)
            member = self._fleet.members[event.target]
            return [] if member.announced or member.phase is not Phase.READY or member.stopping else [self._up(member)]
        if not event.lost and self._source.get(event.target) == event.source:  # else it is gone itself
            del self._source[event.target]
            del self._target[event.source]
        return []

    @staticmethod
    def _up(member: Member) -> Send:
        member.announced = True
        return Send(ROUTER, ReplicaUp(member.replica, member.num_blocks, member.block_size, member.role))

    def lose(self, member: Member, *, asked: bool) -> list[AnyAction]:
        """The member is gone, or will be, since it was asked to: what it shares is lost, and the other one works alone."""
        replica = member.replica
        self._alone.discard(replica)
        target = replica if replica in self._source else self._target.get(replica)
        if target is None:
            return []
        source = self._source.pop(target)
        del self._target[source]
        ended = Unpaired(target, source, lost=True)
        down: list[AnyAction] = [Send(ROUTER, ReplicaDown(replica, lost=True, asked=asked))] if member.announced else []
        member.announced = False
        told = Send(ROUTER, ended)
        if replica == target:
            return [Send(source, ended), *down, told]
        self._fleet.members[target].announced = False  # until it has given back what it cannot serve, and is ready
        self._alone.add(target)
        return [Send(target, ended), told, *down]
