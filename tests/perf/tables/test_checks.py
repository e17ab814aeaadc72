"""Every way in which a table of times can be wrong is one line that names file, row and remedy."""

import polars as pl
import pytest

from squall.errors import ProfileError
from squall.perf.hardware import resolve_gpu
from squall.perf.tables.checks import checked
from squall.perf.tables.operations import OPERATIONS

GEMM = OPERATIONS["gemm"]


def gemm(tokens: list[int], seconds: list[float], **more: object) -> pl.DataFrame:
    shape = {"dtype": "bf16", "rows": 8192, "columns": 8192}
    return pl.DataFrame({"tokens": tokens, "seconds": seconds, "row": range(2, len(tokens) + 2)}).with_columns(
        pl.lit(value).alias(name) for name, value in (shape | more).items()
    )


def test_a_point_measured_twice_is_kept_once() -> None:
    kept = checked(GEMM, gemm([1, 1, 16], [4.0e-5, 4.2e-5, 5e-5]), "t.csv")
    assert kept["tokens"].to_list() == [1, 16]
    assert kept["seconds"].to_list() == pytest.approx([4.1e-5, 5e-5])


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        (gemm([1, 2], [1e-5, 0.0]), r"t.csv: row 3: the time of gemm is 0.0; it must be a number above 0"),
        (gemm([1, 2], [1e-5, float("nan")]), "row 3: the time of gemm is nan"),
        (gemm([1, -2], [1e-5, 1e-5]), "row 3: tokens is -2; it must not be negative"),
        (gemm([1, 1], [1e-5, 9e-5]), "rows 2, 3 are the same gemm .* differ by a factor of 9.0; keep the right one"),
        (gemm([1, 16, 64], [1e-5, 9e-5, 2e-5]), "row 4: gemm takes 2e-05 s at tokens 64, but 9e-05 s at 16 .*measure both again"),
        (gemm([], []), "holds no row of gemm"),
        (gemm([1], [1e-5], dtype=None), "row 2: dtype is empty; gemm needs it"),
    ],
)
def test_what_is_wrong_is_named(rows: pl.DataFrame, what: str) -> None:
    with pytest.raises(ProfileError, match=what):
        checked(GEMM, rows, "t.csv")


def test_milliseconds_read_as_seconds_are_noticed_either_way() -> None:
    h100 = resolve_gpu("h100-sxm")
    right = gemm([4096], [8e-4])  # 550 Gflop: 690 Tflop/s
    assert len(checked(GEMM, right, "t.csv", h100)) == 1
    for factor, which in ((1e3, "long"), (1e-3, "short")):
        with pytest.raises(ProfileError, match=f"its times are too {which}; are they in the unit"):
            checked(GEMM, right.with_columns(pl.col("seconds") * factor), "t.csv", h100)


def test_a_stray_among_many_rows_is_left_out() -> None:
    tokens = list(range(1, 101))
    seconds = [1e-5 + 1e-7 * n for n in tokens]
    seconds[49] = 1e-3
    kept = checked(GEMM, gemm(tokens, seconds), "t.csv")
    assert kept["tokens"].to_list() == [n for n in tokens if n != 50]
