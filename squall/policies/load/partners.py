"""Who relieves whom: overloaded replicas are paired with the ends of what is being loaded.

Only the last replica of a path sends its weights to nobody, so its links are free for activations. Knows no policy.
"""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from squall.core.fleet_view import LoadView, SlotView, Transfer
from squall.core.types import ReplicaId, Role


def tail_last(targets: Iterable[SlotView]) -> list[SlotView]:
    """In an order whose last one can relieve somebody: decode replicas first; faster ones before slower ones."""
    return sorted(targets, key=lambda slot: (slot.role is not Role.DECODE, -slot.nic_bytes_per_s, slot.replica))


def with_partners(view: LoadView, transfers: Sequence[Transfer], live: bool) -> list[Transfer]:
    """The transfers, each with an overloaded replica of its last target's role, as long as there are any."""
    if not live:
        return list(transfers)
    roles = {slot.replica: slot.role for slot in (*view.sources, *view.targets)}
    targets = {slot.replica for slot in view.targets}
    free: list[ReplicaId] = [replica for replica in view.overloaded if replica not in targets]
    paired = []
    for transfer in transfers:
        role = roles[transfer.path[-1]]
        partner = None
        if role is not Role.DECODE:
            partner = next((replica for replica in free if roles.get(replica, role) is role), None)
        if partner is not None:
            free.remove(partner)
            transfer = replace(transfer, live_partner=partner)
        paired.append(transfer)
    return paired
