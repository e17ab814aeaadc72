"""How many replicas there should be. Arithmetic on a read-only view; the configuration class is the policy.

Knows no bounds, cooldown or failures: the controller does.
"""

from msgspec import Struct

from squall.core.fleet_view import ScaleView


class Fixed(Struct, frozen=True, tag_field="kind", tag="fixed", forbid_unknown_fields=True):
    """As many as the fleet's configuration says, always."""

    def __call__(self, view: ScaleView) -> int:
        return view.num_configured


Scale = Fixed
