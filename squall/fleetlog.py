"""What a fleet decided and what was moved for it, as Parquet: one schema, whether it was simulated or served.

    decisions.parquet  a row for every target that changed: when, of which role, from how many to how many replicas, and why
    transfers.parquet  a row for all weights, or KV, that have come to a replica: from where, over which links, how fast

Knows no body and no report.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

from squall.core.metrics import UNSET, Decision, Delivery
from squall.core.types import SECOND

if TYPE_CHECKING:
    import polars

DECISIONS, TRANSFERS = "decisions.parquet", "transfers.parquet"


def decisions_parquet(decisions: Iterable[Decision]) -> bytes:
    """In their order."""
    import polars as pl  # a third of a second: only where it is needed

    schema = {"at": pl.Int64, "role": pl.String, "before": pl.Int64, "after": pl.Int64, "why": pl.String}
    rows = [(each.at, each.role, each.before, each.after, each.why) for each in decisions]
    return _parquet(pl.DataFrame(rows, schema=schema, orient="row"))


def transfers_parquet(deliveries: Iterable[Delivery]) -> bytes:
    """In order of their beginning."""
    import polars as pl

    schema: polars._typing.SchemaDict = {
        "what": pl.String, "kind": pl.String, "source": pl.String, "replica": pl.Int64, "route": pl.List(pl.Int64),
        "path": pl.List(pl.String), "request": pl.Int64, "num_bytes": pl.Int64, "started_at": pl.Int64, "duration": pl.Int64,
        "bytes_per_s": pl.Float64, "layers_at": pl.List(pl.Int64),
    }  # fmt: skip
    rows = [
        (
            each.what, each.kind, each.source, each.replica, each.route, each.path, _known(each.request), each.num_bytes,
            each.began_at, each.took, each.num_bytes / each.took * SECOND if each.took and each.num_bytes else None,
            [_known(at) for at in each.layers_at] or None,
        )
        for each in sorted(deliveries, key=lambda each: each.began_at)
    ]  # fmt: skip
    return _parquet(pl.DataFrame(rows, schema=schema, orient="row"))


def _known(value: int) -> int | None:
    return None if value == UNSET else value


def _parquet(frame: polars.DataFrame) -> bytes:
    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    return buffer.getvalue()
