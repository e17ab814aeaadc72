"""Kinds of numbers that keys of a configuration take; a value outside is refused when the file is read. Knows no key.

And how people are told a number of things.
"""

from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
Gpus = Annotated[int, Meta(ge=1, le=1024)]  # of one replica
Blocks = Annotated[int, Meta(ge=1, le=1_000_000_000)]  # of KV, of one replica
Seconds = Annotated[float, Meta(gt=0)]
Delay = Annotated[float, Meta(ge=0)]
Rate = Annotated[float, Meta(gt=0)]
Amount = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]


def counted(number: int, thing: str) -> str:
    """For people: "1 host", "2 hosts"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"
