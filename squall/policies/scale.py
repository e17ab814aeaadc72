"""How many replicas there should be. Arithmetic on a read-only view; the configuration class is the policy.

Knows no bounds, cooldown or failures: the controller does.
"""

from msgspec import Struct

from squall.core.fleet_view import ScaleView, Wanted


class Fixed(Struct, frozen=True, tag_field="kind", tag="fixed", forbid_unknown_fields=True):
    """As many as the fleet's configuration says, always."""

    @property
    def constant(self) -> bool:
        return True

    def __call__(self, view: ScaleView) -> Wanted:
        return Wanted({role: seen.initial for role, seen in view.roles.items()}, "as configured")


Scale = Fixed
