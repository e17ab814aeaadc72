"""So many unfinished requests a replica, averaged over a long and a short window. The rule of Knative's autoscaler, and KEDA's.

Knows no model, no tokens and no throughput: the only policy that needs no capacity.
"""

from math import ceil
from typing import ClassVar

from msgspec import Struct

from squall.core.fleet_view import RoleView, ScaleView, Wanted
from squall.core.types import Role
from squall.policies.scale.needs import present, refuse_unless_positive, refuse_unless_share


class Concurrency(Struct, frozen=True, tag_field="kind", tag="concurrency", forbid_unknown_fields=True):
    """Mean unfinished requests / (`target` * `utilisation`), rounded up.

    The mean is over `stable_s`; when the mean over the last `panic_share` of it asks for `panic_threshold` times the replicas
    that are ready, the fleet panics: it follows the short window upwards and does not shrink. (Knative Pod Autoscaler: 60 s,
    10 %, 200 %.) How long it stays large after a panic is the controller's stabilisation window.

    While a whole window has not been seen, the number of this instant may make the fleet grow, and never shrink.

    Attributes:
        target: unfinished requests of a colocated or a decode replica when it is full; `prefill_target`, of a prefill replica.
        utilisation: the share of the target that is aimed at.
        stable_s: the long window; `panic_share` of it is the short one.
        panic_threshold: at least 1.
    """

    reactive: ClassVar[bool] = True

    target: float = 32.0
    prefill_target: float = 4.0
    utilisation: float = 0.7
    stable_s: float = 60.0
    panic_share: float = 0.1
    panic_threshold: float = 2.0

    def __post_init__(self) -> None:
        for key in ("target", "prefill_target", "stable_s"):
            refuse_unless_positive(key, getattr(self, key))
        refuse_unless_share("utilisation", self.utilisation)
        refuse_unless_share("panic_share", self.panic_share)
        if (short_s := self.panic_share * self.stable_s) < 0.001:
            raise ValueError(
                f"panic_share of stable_s ({self.stable_s}) is {short_s} s, a window of less than a millisecond; raise one"
            )
        if not self.panic_threshold >= 1:
            raise ValueError(
                f"panic_threshold must be at least 1, not {self.panic_threshold}: below it the fleet would always panic"
            )

    @property
    def concurrency_s(self) -> float:
        return self.stable_s

    def __call__(self, view: ScaleView) -> Wanted:
        answers = {role: self._count(seen) for role, seen in view.roles.items()}
        return Wanted({role: count for role, (count, _) in answers.items()}, {role: why for role, (_, why) in answers.items()})

    def _count(self, seen: RoleView) -> tuple[int, str]:
        stable = seen.mean_unfinished(self.stable_s)
        short = seen.mean_unfinished(self.stable_s * self.panic_share)
        now = seen.num_queued + seen.num_waiting + seen.num_running
        if stable is None:
            known = now if short is None else short
            return max(present(seen), self._needed(known, seen.role)), f"{known:.1f} unfinished, no whole window seen yet"
        wanted, why = self._needed(stable, seen.role), f"{stable:.1f} unfinished over {self.stable_s:g} s"
        if short is not None:
            panic = self._needed(short, seen.role)
            if panic > 1 and panic >= self.panic_threshold * seen.num_ready:
                return max(panic, present(seen)), f"panic: {short:.1f} unfinished over {self.stable_s * self.panic_share:g} s"
        return wanted, why

    def _needed(self, unfinished: float, role: Role) -> int:
        target = self.prefill_target if role is Role.PREFILL else self.target
        return ceil(unfinished / (target * self.utilisation))
