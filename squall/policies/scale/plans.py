"""Numbers that are known before: as configured, or by the clock."""

from itertools import pairwise

from msgspec import Struct

from squall.core.fleet_view import ScaleView, Wanted
from squall.core.types import SECOND, Role
from squall.policies.scale.needs import present, refuse_unless_positive


class Fixed(Struct, frozen=True, tag_field="kind", tag="fixed", forbid_unknown_fields=True):
    """As many as the fleet's configuration says, always."""

    @property
    def constant(self) -> bool:
        return True

    def __call__(self, view: ScaleView) -> Wanted:
        return Wanted({role: seen.initial for role, seen in view.roles.items()}, "as configured")


class Step(Struct, frozen=True, forbid_unknown_fields=True):
    """From `at_s` seconds on, so many replicas; of a role whose number is not given, as many as there are.

    `replicas` is for a colocated fleet, `prefill` and `decode` are for a disaggregated one.
    """

    at_s: float
    replicas: int | None = None
    prefill: int | None = None
    decode: int | None = None

    def __post_init__(self) -> None:
        if not self.at_s >= 0:
            raise ValueError(f"at_s counts from the start of the run: it must be at least 0, not {self.at_s}")
        numbers = {"replicas": self.replicas, "prefill": self.prefill, "decode": self.decode}
        for key, number in numbers.items():
            if number is not None and number < 0:
                raise ValueError(f"{key} must be at least 0, not {number}")
        if not any(number is not None for number in numbers.values()):
            raise ValueError(f"the step at {self.at_s} s changes nothing: give it replicas, or prefill and decode")

    def count(self, role: Role) -> int | None:
        return {Role.BOTH: self.replicas, Role.PREFILL: self.prefill, Role.DECODE: self.decode}[role]


class Schedule(Struct, frozen=True, tag_field="kind", tag="schedule", forbid_unknown_fields=True):
    """By the clock, counted from the start of the run: the last step that has come holds.

    Attributes:
        steps: in ascending `at_s`.
        period_s: begins again after so long (86400 is a day); the last step holds until the first one comes. None: never.
    """

    steps: tuple[Step, ...]
    period_s: float | None = None

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError("steps must name at least one step, such as [{ at_s = 0, replicas = 4 }]")
        times = [step.at_s for step in self.steps]
        if any(later <= earlier for earlier, later in pairwise(times)):
            raise ValueError(f"steps must come in the order of their at_s, each later than the one before, not {times}")
        if self.period_s is not None:
            refuse_unless_positive("period_s", self.period_s)
            if times[-1] >= self.period_s:
                raise ValueError(f"the last step is at {times[-1]} s: period_s must be above that, not {self.period_s}")

    def __call__(self, view: ScaleView) -> Wanted:
        since, period = (view.now - view.began_at) / SECOND, self.period_s
        passed = since // period if period is not None else 0
        at = since - passed * period if period is not None else since
        come = [step for step in self.steps if step.at_s <= at]
        if passed and not come:
            come = [self.steps[-1]]
        counts = {role: self._count(come, role, present(seen)) for role, seen in view.roles.items()}
        return Wanted(counts, f"schedule, step at {come[-1].at_s:g} s" if come else "schedule, before its first step")

    def _count(self, come: list[Step], role: Role, present: int) -> int:
        """Of the last step that says something about the role."""
        return next((count for step in reversed(come) if (count := step.count(role)) is not None), present)
