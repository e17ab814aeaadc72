"""Kinds of numbers that keys of a configuration take; a value outside is refused when the file is read. Knows no key."""

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
