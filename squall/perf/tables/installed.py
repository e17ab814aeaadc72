"""The tables of the installed package `aiconfigurator-core` (extra `measured`): where they lie, and which of them fit a GPU.

Reads its Parquet files as data and imports none of its code.
"""

import re
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from squall.errors import ProfileError
from squall.extras import install
from squall.perf.hardware import Gpu
from squall.perf.tables.aiconfigurator import SYSTEMS, read_aiconfigurator
from squall.perf.tables.kept import folder_of, kept_source
from squall.perf.tables.profile import OperatorProfile
from squall.perf.tables.source import FastestProducts, TableSource

PACKAGE = "aiconfigurator-core"
ENGINES = ("vllm", "sglang", "trtllm")
_FAMILIES = ("gemm", "attention", "mla", "comm", "moe")


def installed_root() -> Path | None:
    """The folder with one folder a system; None where the package is not installed."""
    try:
        root = Path(str(distribution(PACKAGE).locate_file("aiconfigurator_core"))) / "systems" / "data"
    except PackageNotFoundError:
        return None
    return root if root.is_dir() else None


def installed_tables(gpu: Gpu, engine: str = "vllm") -> OperatorProfile:
    """The newest tables of a GPU and an engine. Raises ProfileError saying what is there."""
    files, place = _files(gpu, engine)
    return read_aiconfigurator(files, gpu, engine, place)


def installed_source(gpu: Gpu, engine: str = "vllm") -> TableSource:
    """The installed tables of an engine, with the fastest engine's matrix products: one for all who ask for the same.

    Raises as `installed_tables`.
    """
    files, place = _files(gpu, engine)
    root = installed_root()
    others = []
    for other in ENGINES:
        theirs = _newest(root / SYSTEMS[gpu.name] / "gemm" / other) if root is not None and other != engine else []
        if theirs:
            others.append((other, tuple(theirs), folder_of(theirs, gpu.name, other)))
    return _source(gpu, engine, place, tuple(files), folder_of(files, gpu.name, engine, place), tuple(others))


_Others = tuple[tuple[str, tuple[Path, ...], Path], ...]
"""Engines, their files of products, and where the tables of these are kept."""


@lru_cache(maxsize=4)
def _source(gpu: Gpu, engine: str, place: str, files: tuple[Path, ...], folder: Path, others: _Others) -> TableSource:
    """By what the files are, whose hash the folders' names have."""
    own = kept_source(folder, lambda: read_aiconfigurator(files, gpu, engine, place))
    products = [kept_source(kept, partial(read_aiconfigurator, theirs, gpu, other)) for other, theirs, kept in others]
    return FastestProducts(own, products)


def _files(gpu: Gpu, engine: str) -> tuple[list[Path], str]:
    """The newest tables, and a word for where they are from."""
    root = installed_root()
    if root is None:
        raise ProfileError(f"measured tables need {PACKAGE}: {install('measured')}; or set latency.path to a profile")
    if engine not in ENGINES:
        raise ProfileError(f"engine {engine!r} has no measured tables; use one of {', '.join(ENGINES)}")
    system = SYSTEMS.get(gpu.name)
    if system is None or not (root / system).is_dir():
        known = ", ".join(name for name, theirs in SYSTEMS.items() if (root / theirs).is_dir())
        raise ProfileError(
            f'{PACKAGE} has no measured tables of {gpu.name}; it has {known}: use one, or latency.kind = "roofline"'
        )
    files = [file for family in _FAMILIES for file in _newest(root / system / family / engine)]
    files += _newest(root / system / "comm" / "nccl")
    if not files:
        raise ProfileError(f"{PACKAGE} has no tables of {engine} on {gpu.name}; it has {', '.join(_engines(root / system))}")
    return files, f"{PACKAGE} {distribution(PACKAGE).version}, {system}"


def _newest(folder: Path) -> list[Path]:
    """Of each table the one of the newest version that has it."""
    newest: dict[str, Path] = {}
    if folder.is_dir():
        for version in sorted(folder.iterdir(), key=lambda path: _version(path.name)):
            newest |= {file.name: file for file in version.glob("*_perf.parquet")}
    return sorted(newest.values())


def _version(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def _engines(system: Path) -> list[str]:
    return sorted({engine.name for family in _FAMILIES for engine in (system / family).glob("*") if engine.name in ENGINES})
