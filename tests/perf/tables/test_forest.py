"""The forest: close to what it has seen, growing beyond it, and with intervals from rows that its trees have not seen."""

from itertools import pairwise

import polars as pl
import pytest

from squall.perf.operators import Provenance
from squall.perf.tables.forest import ForestCurve
from squall.perf.tables.operations import OPERATIONS

pytest.importorskip("sklearn", reason="the forest needs scikit-learn (pip install 'squall[forest]')")


def curve() -> ForestCurve:
    rows = pl.DataFrame({"bytes": [1 << k for k in range(4, 27)] + [3 << k for k in range(4, 24)]})
    rows = rows.with_columns((2e-6 + pl.col("bytes") / 2e12 * (1 + 0.3 * (pl.col("bytes") > 1 << 20))).alias("seconds"))
    return ForestCurve(OPERATIONS["elementwise"], (), rows)


def test_it_is_close_to_what_it_has_seen() -> None:
    forest = curve()
    for size, truth in ((1 << 12, 2e-6 + (1 << 12) / 2e12), (5 << 20, 2e-6 + (5 << 20) / 2e12 * 1.3)):
        estimate = forest.estimate((size,))
        assert estimate.seconds == pytest.approx(truth, rel=0.1)
        assert estimate.provenance is Provenance.INTERPOLATED
        assert 0 < estimate.spread < 0.3


def test_beyond_the_rows_it_grows() -> None:
    forest = curve()
    times = [forest.estimate((1 << k,)).seconds for k in range(26, 34)]
    assert all(1.9 < b / a < 2.1 for a, b in pairwise(times))
    assert forest.estimate((1 << 33,)).provenance is Provenance.EXTRAPOLATED


def test_the_same_rows_make_the_same_forest() -> None:
    assert curve().estimate((12345,)) == curve().estimate((12345,))
