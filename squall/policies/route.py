"""Which replica gets a request. Arithmetic on a read-only view; the configuration class is the policy.

Knows no queues, failures or retries: the router does.
"""

from msgspec import Struct


class RoundRobin(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="round_robin"):
    """Each replica in turn."""


class LeastLoaded(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="least_loaded"):
    """The replica with the fewest tokens promised: prompts of its unfinished requests, and a share for what they generate."""

    output_tokens: int = 256


class Pull(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="pull"):
    """One shared queue; a replica takes the next request when it has fewer than `max_outstanding` unfinished ones."""

    max_outstanding: int = 16


Route = RoundRobin | LeastLoaded | Pull
