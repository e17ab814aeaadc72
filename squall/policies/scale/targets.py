"""How many replicas are enough: a fewest and a most, and what satisfies two such demands at once.

Knows no policy and no fleet.
"""

from __future__ import annotations

from math import ceil


class Target:
    """A number of replicas between these two needs no change. A deliberate plain object: every decision makes half a dozen.

    Attributes:
        why: names the equation that asks for most.
        one_by_one: a decision gives up one replica.
    """

    __slots__ = ("fewest", "most", "one_by_one", "why")

    def __init__(self, fewest: int, most: int, why: str = "", one_by_one: bool = False) -> None:
        self.fewest = fewest
        self.most = most
        self.why = why
        self.one_by_one = one_by_one

    def step(self, count: int) -> int:
        """What is to be added to `count`: into the middle of the target where it is below, down to its most where it is above."""
        if count < self.fewest:
            return (self.fewest + self.most + 1) // 2 - count
        if count <= self.most:
            return 0
        return max(self.most - count, 1 - count, -1 if self.one_by_one else -count)


def between(amount: int, of_one: float, lower: float, upper: float, why: str) -> Target:
    """So many that each of them has between `lower` and `upper` times what one replica is good for."""
    return Target(ceil(amount / upper / of_one), ceil(amount / lower / of_one), why)


def both(one: Target, other: Target) -> Target:
    """What satisfies both."""
    asks_more = one if (one.fewest, one.most) >= (other.fewest, other.most) else other
    fewest = asks_more.fewest
    most = max(one.most, other.most, fewest)
    return Target(fewest, most, f"{asks_more.why}, {fewest} to {most} wanted")


def one_by_one(target: Target) -> Target:
    """The same, but that a decision gives up one replica."""
    return Target(target.fewest, target.most, target.why, one_by_one=True)
