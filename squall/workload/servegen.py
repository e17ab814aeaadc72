"""ServeGen's clients: how often one client asked in every ten minutes, and how long its prompts and answers were every six hours.

A client is two files, NAME-trace.csv (without a header: start in seconds, requests a second, coefficient of variation, family of
the gaps, its shape and scale) and NAME-dataset.json beside it, or the same packed as .json.gz (start -> column -> histogram of
tokens, written as a Python or JSON dictionary). These are statistics, not requests: requests are drawn from them. A window gets
the very number of requests that its rate says, with gaps of the recorded family, stretched to fill it. Multimodal prompts are as
long as their text and what their images, sounds and films are turned into.

Every window has random numbers of its own: where one begins to read changes nothing.
"""

import csv
import gzip
import json
import math
from ast import literal_eval
from bisect import bisect_right
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from squall.core.types import SECOND
from squall.errors import TraceError
from squall.workload.limits import MOST_REQUESTS, MOST_TOKENS
from squall.workload.parsing import parse_number, parse_tokens
from squall.workload.rows import first_bytes
from squall.workload.streams import stream
from squall.workload.traces import Trace

_FAMILIES = ("Gamma", "Weibull", "Exponential", "")
_MEDIA = ("image", "audio", "video")
_LEAST_SHAPE = 0.005  # below it gaps differ by more than a float can hold


class _Window(Struct, frozen=True):
    """One line of the rates. `start_s`, `end_s` in seconds; `shape` of the gaps."""

    start_s: float
    end_s: float
    rate_rps: float
    family: str
    shape: float


def is_client(path: Path) -> bool:
    """Whether a file looks like a client's rates."""
    if not path.is_file():
        return False
    try:
        with path.open(encoding="utf-8-sig") as file:
            fields = file.readline(1000).strip().split(",")
    except (OSError, UnicodeDecodeError):
        return False
    return len(fields) == 6 and fields[3] in _FAMILIES and fields[0].isdecimal()


def draw_client(path: Path, seed: int, start_s: float, duration_s: float | None, most: int | None) -> Trace:
    """The requests of one client between `start_s` and the end of `duration_s`, or the first `most` of them.

    Raises TraceError for a bad file, and where so many requests would be drawn that a limit must have been forgotten.
    """
    end_s = math.inf if duration_s is None else start_s + duration_s
    windows = [window for window in _read_windows(path) if window.end_s > start_s and window.start_s < end_s]
    expected = sum(_num_requests(window) for window in windows)
    if most is None and expected > MOST_REQUESTS:
        raise TraceError(f"{path}: stands for {expected:,} requests; say which with workload.duration_s or max_requests")
    lengths = _Lengths(path)
    times: list[int] = []
    prompts: list[int] = []
    outputs: list[int] = []
    for window in windows:
        if most is not None and len(times) >= most:
            break
        count = _num_requests(window)
        if not count:
            continue
        drawn = window.start_s + _within(window, seed, count)
        kept = (drawn >= start_s) & (drawn < end_s)
        prompt, output = lengths.draw(window.start_s, seed, count)
        times += np.rint(drawn[kept] * SECOND).astype(np.int64).tolist()
        prompts += prompt[kept].tolist()
        outputs += output[kept].tolist()
    if not times:
        raise TraceError(f"{path}: no request in the window; change workload.start_s or duration_s")
    note = f"{path}: these requests are drawn from a client's statistics, none was recorded"
    return Trace(times[:most], prompts[:most], outputs[:most], (note,))


def _num_requests(window: _Window) -> int:
    return round(window.rate_rps * (window.end_s - window.start_s))


def _within(window: _Window, seed: int, count: int) -> NDArray[np.float64]:
    """`count` ascending instants from the window's start, with one gap before each and one after the last."""
    draws = stream(seed, f"servegen arrivals {window.start_s:g}")
    if window.family == "Gamma":
        gaps = draws.standard_gamma(window.shape, count + 1)
    elif window.family == "Weibull":
        gaps = draws.weibull(window.shape, count + 1)
    else:
        gaps = draws.standard_exponential(count + 1)
    ends = np.cumsum(gaps)
    total = ends[-1] or 1.0  # gaps of such a shape may all be too small for a float: then all is one burst
    instants: NDArray[np.float64] = ends[:-1] / total * (window.end_s - window.start_s)
    return instants


def _read_windows(path: Path) -> list[_Window]:
    first_bytes(path)
    try:
        rows = list(csv.reader(path.read_text(encoding="utf-8-sig").splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: cannot be read ({error})") from None
    parsed = [_parse_row(path, line, row) for line, row in enumerate(rows, 1) if row]
    if not parsed:
        raise TraceError(f"{path}: is empty; a ServeGen client has a line for every ten minutes")
    starts = [start for start, *_ in parsed]
    for line, (start, later) in enumerate(pairwise(starts), 2):
        if later <= start:
            raise TraceError(f"{path} line {line}: starts at {later:g} s, which is not after {start:g} s in the line above")
    step = starts[1] - starts[0] if len(starts) > 1 else 600.0
    ends = [*starts[1:], starts[-1] + step]
    return [_Window(start, end, rate, family, shape) for (start, rate, family, shape), end in zip(parsed, ends, strict=True)]


def _parse_row(path: Path, line: int, row: list[str]) -> tuple[float, float, str, float]:
    """Start, rate, family and shape."""
    where = f"{path} line {line}"
    if len(row) != 6:
        raise TraceError(f"{where}: has {len(row)} of 6 columns (start, rate, cv, family, shape, scale); the file may be cut off")
    numbers = []
    for name, text in (("start", row[0]), ("rate", row[1]), ("shape", row[4])):
        try:
            number = parse_number(text)
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf:
            raise TraceError(f"{where}: {name} is {text!r}; it must be a number, 0 or more")
        numbers.append(float(number))
    start, rate, shape = numbers
    family = row[3].strip()
    if family not in _FAMILIES:
        raise TraceError(f"{where}: the family of the gaps is {family!r}; it must be Gamma, Weibull or Exponential")
    if rate and family in ("Gamma", "Weibull") and shape < _LEAST_SHAPE:
        raise TraceError(f"{where}: shape is {row[4]!r}; that of a {family} distribution must be at least {_LEAST_SHAPE}")
    return start, rate, family, shape


class _Lengths:
    """The histograms beside a client's rates, parsed when they are first used."""

    def __init__(self, path: Path) -> None:
        self._path, self._tables = _open_dataset(path)
        self._starts = sorted(self._tables)
        self._parsed: dict[tuple[int, str], tuple[NDArray[np.int64], NDArray[np.float64]] | None] = {}

    def draw(self, at_s: float, seed: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`count` prompts and outputs of the window that begins at `at_s`."""
        place = max(0, bisect_right(self._starts, at_s) - 1)

        def column(name: str) -> NDArray[np.int64]:
            values, shares = self._histogram(place, name)
            draws = stream(seed, f"servegen {name} {at_s:g}").random(count)
            drawn: NDArray[np.int64] = values[np.searchsorted(shares, draws * shares[-1], side="right")]
            return drawn

        columns = self._tables[self._starts[place]]
        if "input_tokens" in columns:
            prompt = column("input_tokens")
        else:
            prompt = column("text_tokens")
            for medium in _MEDIA:
                if f"{medium}_tokens" in columns:
                    many = column(f"{medium}_count") if f"{medium}_count" in columns else 1
                    whole = prompt + column(f"{medium}_tokens") * np.asarray(many, dtype=np.float64)  # no product overflows it
                    prompt = np.minimum(whole, MOST_TOKENS).astype(np.int64)
        return np.maximum(prompt, 1), np.maximum(column("output_tokens"), 1)

    def _histogram(self, place: int, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Values and cumulated shares; of the nearest stretch of time before (or else after) where this one has none."""
        for near in (*range(place, -1, -1), *range(place + 1, len(self._starts))):
            if (near, name) not in self._parsed:
                self._parsed[near, name] = self._parse(self._starts[near], name)
            found = self._parsed[near, name]
            if found is not None:
                return found
        raise TraceError(f"{self._path}: has no {name} at any time")

    def _parse(self, start: int, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
        text = self._tables[start].get(name, {})
        try:
            table = literal_eval(text) if isinstance(text, str) else text
            values = np.array([parse_tokens(value, 0) for value in table], dtype=np.int64)
            shares = np.array([float(share) for share in table.values()], dtype=np.float64)
        except (ValueError, SyntaxError, TypeError, AttributeError, MemoryError, RecursionError):  # the last two: too deep
            values, shares = np.array([-1]), np.array([1.0])
        if len(values) and not (values.min() >= 0 and np.isfinite(shares).all() and shares.min() >= 0):
            raise TraceError(
                f"{self._path}: {name} at {start} is {str(text)[:40]!r}; it must be a dictionary of tokens and shares"
            )
        return (values, np.cumsum(shares)) if len(values) and shares.sum() > 0 else None


def _open_dataset(path: Path) -> tuple[Path, Mapping[int, Mapping[str, Any]]]:
    """The file beside the rates, and what it holds."""
    stem = path.name.removesuffix("trace.csv") + "dataset.json"
    found = next((file for file in (path.with_name(stem), path.with_name(stem + ".gz")) if file.is_file()), None)
    if found is None:
        raise TraceError(f"{path}: {stem}, which tells how long this client's requests are, is not beside it")
    first_bytes(found)
    try:
        raw = gzip.decompress(found.read_bytes()) if found.suffix == ".gz" else found.read_bytes()
        tables = {int(start): dict(columns) for start, columns in json.loads(raw).items()}
    except (OSError, EOFError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise TraceError(f"{found}: is not a ServeGen dataset ({error})") from None
    if not tables:
        raise TraceError(f"{found}: is empty")
    return found, tables
