"""The tables of what a fleet decided and what was moved for it: one schema, whoever writes them."""

import io

import polars as pl

from squall.core.fleet_view import Place, Transfer
from squall.core.metrics import UNSET, Decision, kv_delivered, weights_delivered
from squall.core.types import SECOND
from squall.fleetlog import decisions_parquet, transfers_parquet


def test_decisions_are_rows_in_their_order() -> None:
    decisions = [Decision(5, "prefill", 1, 3, "prompts that wait"), Decision(9, "decode", 2, 1, "asked for")]
    frame = pl.read_parquet(io.BytesIO(decisions_parquet(decisions)))
    assert frame.columns == ["at", "role", "before", "after", "why"]
    assert frame.rows() == [(5, "prefill", 1, 3, "prompts that wait"), (9, "decode", 2, 1, "asked for")]


def test_transfers_tell_from_where_over_what_and_how_fast() -> None:
    striped = Transfer("m", Place("gpu", 0), (4, 5), "striped", more_sources=(Place("host", 2),))
    later = weights_delivered(4, striped, 6_000_000_000, 2 * SECOND, 3 * SECOND, ("nic0.out", "nic4.in"), (UNSET, 4 * SECOND))
    sooner = kv_delivered(1, 2, 77, ("gpu1.out",), 500, SECOND, SECOND // 2)
    frame = pl.read_parquet(io.BytesIO(transfers_parquet([later, sooner])))
    kv, weights = frame.iter_rows(named=True)
    assert weights == {
        "what": "weights", "kind": "striped", "source": "gpu 0, host 2", "replica": 4, "route": [4, 5],
        "path": ["nic0.out", "nic4.in"], "request": None, "num_bytes": 6_000_000_000, "started_at": 2 * SECOND,
        "duration": 3 * SECOND, "bytes_per_s": 2e9, "layers_at": [None, 4 * SECOND],
    }  # fmt: skip
    assert (kv["what"], kv["kind"], kv["source"], kv["replica"], kv["request"]) == ("kv", "handoff", "gpu 1", 2, 77)
    assert (kv["bytes_per_s"], kv["layers_at"]) == (1000.0, None)


def test_what_moved_nothing_has_no_speed_and_empty_tables_have_their_columns() -> None:
    mock = Transfer("m", Place("store"), (0,), "mock", seconds=2.0)
    [row] = pl.read_parquet(io.BytesIO(transfers_parquet([weights_delivered(0, mock, 0, 0, 2 * SECOND)]))).iter_rows(named=True)
    assert (row["source"], row["num_bytes"], row["bytes_per_s"]) == ("store", 0, None)
    assert pl.read_parquet(io.BytesIO(transfers_parquet([]))).columns == list(row)
    assert pl.read_parquet(io.BytesIO(decisions_parquet([]))).schema["why"] == pl.String
