"""How many replicas there should be. Arithmetic on a read-only view; the configuration class is the policy."""

from msgspec import Struct


class Fixed(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="fixed"):
    """As many as the fleet's configuration says, always."""


Scale = Fixed
