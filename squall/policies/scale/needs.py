"""What scale policies count alike: replicas that are there, work that waits, KV that is promised, and what is wrong with a key.

Knows no policy.
"""

from math import ceil

from squall.core.fleet_view import Capacity, RoleView, ScaleView, Wanted
from squall.core.types import Role

BOTH, PREFILL, DECODE = Role.BOTH, Role.PREFILL, Role.DECODE  # a member looked up in its class takes as long as a call


def present(seen: RoleView) -> int:
    """Replicas that work or are on their way; not those that are leaving, or have left."""
    return seen.num_ready + seen.num_coming


def stay(view: ScaleView, why: str) -> Wanted:
    """As many as there are."""
    return Wanted({role: present(seen) for role, seen in view.roles.items()}, why)


def computing(view: ScaleView) -> RoleView:
    """The role that computes prompts: PREFILL, or BOTH."""
    return view.roles[BOTH] if BOTH in view.roles else view.roles[PREFILL]


def keeping(view: ScaleView) -> RoleView:
    """The role that keeps KV while answers grow: DECODE, or BOTH."""
    return view.roles[BOTH] if BOTH in view.roles else view.roles[DECODE]


def backlog_tokens(seen: RoleView) -> int:
    """Prompt tokens before their first token: in the router's queue and at replicas."""
    return seen.num_queued_tokens + seen.num_waiting_tokens


def kv_tokens(view: ScaleView) -> int:
    """KV that the requests at all replicas may come to need. What prefill replicas have now, decode replicas will have."""
    return sum(seen.num_promised_tokens for seen in view.roles.values())


def for_tokens(tokens: float, capacity: Capacity, share: float) -> int:
    """Replicas whose KV pools hold `tokens` while filled to `share`."""
    return ceil(tokens / (share * capacity.num_blocks * capacity.block_size))


def is_known(capacity: Capacity | None) -> bool:
    """Whether there is something to divide by."""
    return capacity is not None and min(capacity.prefill_tokens_per_s, capacity.num_blocks, capacity.block_size) > 0


# -- keys


def refuse_crossed(lower_key: str, lower: float, upper_key: str, upper: float) -> None:
    """Raises ValueError unless 0 < lower < upper."""
    refuse_unless_positive(lower_key, lower)
    if lower >= upper:
        raise ValueError(f"{lower_key} must be below {upper_key} ({upper}), not {lower}: a fleet between the two stays as it is")


def refuse_unless_positive(key: str, value: float) -> None:
    """Raises ValueError."""
    if not value > 0:
        raise ValueError(f"{key} must be above 0, not {value}")


def refuse_unless_share(key: str, value: float) -> None:
    """Raises ValueError unless 0 < value <= 1."""
    if not 0 < value <= 1:
        raise ValueError(f"{key} is a share: it must be above 0 and at most 1, not {value}")
