"""How weights reach a new replica. Arithmetic on a read-only view; the configuration class is the policy."""

from msgspec import Struct


class Disk(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="disk"):
    """Every replica reads its checkpoint from its own disk."""


Load = Disk
