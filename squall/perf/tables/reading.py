"""Reading tables of other people's formats: CSV, gzip-ed or not, and Parquet. Knows no format's columns."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from squall.errors import ProfileError
from squall.perf.tables.checks import ROW

MILLI, MICRO = 1e-3, 1e-6


def read_table(path: Path, needed: Sequence[str]) -> pl.DataFrame:
    """A table with at least these columns, and `row`: the line of the file (CSV) or the number of the row (Parquet).

    Raises ProfileError naming the file and the first column that is missing.
    """
    try:
        with path.open("rb") as file:
            if file.read(23) == b"version https://git-lfs":
                raise ProfileError(f"{path}: is a git-lfs pointer, not the file itself; run `git lfs pull` in its folder")
        if path.suffix == ".parquet":
            frame = pl.read_parquet(path).with_row_index(ROW, offset=1)
        else:
            frame = pl.read_csv(path, infer_schema_length=None).with_row_index(ROW, offset=2)
    except FileNotFoundError:
        raise ProfileError(f"{path}: no such file") from None
    except (OSError, pl.exceptions.PolarsError) as error:
        raise ProfileError(f"{path}: cannot be read as a table ({str(error).splitlines()[0]})") from None
    for column in needed:
        if column not in frame.columns:
            close = [name for name in frame.columns if name.partition("_")[0] == column.partition("_")[0]]
            hint = f"; it has {', '.join(close)}" if close else ""
            raise ProfileError(f"{path}: has no column {column!r}{hint}")
    return frame


def numbers(path: Path, frame: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """The frame with these columns as numbers. Raises ProfileError naming the row of a value that is none."""
    for column in columns:
        cast = frame[column].cast(pl.Float64, strict=False)
        bad = frame.filter(cast.is_null() & frame[column].is_not_null() & (frame[column].cast(pl.String) != ""))
        if not bad.is_empty():
            raise ProfileError(f"{path}: row {bad[ROW][0]}: {column} is {bad[column][0]!r}; it must be a number")
        frame = frame.with_columns(cast.alias(column))
    return frame


def pick(frame: pl.DataFrame, columns: Mapping[str, pl.Expr | int | str], seconds: pl.Expr) -> pl.DataFrame:
    """Rows of an operator: its columns from expressions or constants, `seconds` and `row`."""
    return frame.select(
        *(value.alias(name) if isinstance(value, pl.Expr) else pl.lit(value).alias(name) for name, value in columns.items()),
        seconds.cast(pl.Float64).alias("seconds"),
        ROW,
    )


def tables_in(path: Path) -> list[Path]:
    """The table files of a folder, its subfolders included; the file itself where it is one. Raises ProfileError for none."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ProfileError(f"{path}: no such file or folder; give the folder of a profile")
    found = sorted(file for file in path.rglob("*") if re.search(r"\.(csv|csv\.gz|parquet)$", file.name))
    if not found:
        raise ProfileError(f"{path}: holds no .csv, .csv.gz or .parquet file; give the folder of a profile")
    return found
