"""What several batching policies count in the same way. Knows no policy."""

from typing import Literal

Preemption = Literal["recompute", "swap"]
"""What becomes of the KV of who is preempted."""


def at_least(name: str, value: int, least: int = 1) -> None:
    """Raises ValueError where a key of a policy is smaller than it can be."""
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")


def fraction(name: str, value: float) -> None:
    """Raises ValueError where a key is no part of something."""
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be from 0 to less than 1, not {value}")


def check_swap(preemption: Preemption, swap_blocks: int) -> None:
    """Raises ValueError where one of the two keys says that KV goes to host memory, and the other one does not."""
    at_least("swap_blocks", swap_blocks, 0)
    if preemption == "swap" and not swap_blocks:
        raise ValueError('swap_blocks must be at least 1 with preemption = "swap"')
    if preemption != "swap" and swap_blocks:
        raise ValueError(f'swap_blocks = {swap_blocks} is for preemption = "swap"; leave it out, or say that')


def most_in_batch(max_num_seqs: int, num_stages: int) -> int:
    """Requests in one batch, where all batches of a pipeline together hold `max_num_seqs`."""
    return max_num_seqs // num_stages or 1


def watermark_blocks(part: float, num_blocks: int, num_running: int) -> int:
    """Blocks that an admission must leave free, lest the running ones be preempted at once. None for who runs alone."""
    return int(part * num_blocks) if num_running else 0
