"""From the words of `[latency]` to a source of measured operator times, and from another format's files to a profile.

Knows which formats there are and nothing of what is in them.
"""

from collections.abc import Callable
from pathlib import Path

from squall.errors import ConfigError, ProfileError
from squall.perf.decompose import Layout
from squall.perf.hardware import Gpu
from squall.perf.model import ModelSpec
from squall.perf.tables.aiconfigurator import of_system, read_aiconfigurator
from squall.perf.tables.forest import ForestCurve
from squall.perf.tables.installed import installed_source, installed_tables
from squall.perf.tables.llmservingsim import read_llmservingsim
from squall.perf.tables.profile import OperatorProfile, load
from squall.perf.tables.reading import tables_in
from squall.perf.tables.source import TableSource
from squall.perf.tables.vidur import read_vidur


def measured_source(
    path: Path | None, gpu: Gpu, model: ModelSpec, layout: Layout, block_size: int, *, engine: str = "vllm", forest: bool = False
) -> TableSource:
    """The source that `[latency] kind = "measured"` (or "forest") means: the profile at `path`, or the installed tables.

    Raises ProfileError where there is none, or where it was measured for something else.
    """
    if path is None and not forest:
        return installed_source(gpu, engine)
    profile = installed_tables(gpu, engine) if path is None else load(path)
    place = str(path or "the installed tables")
    profile.check(place, gpu, layout.tp, block_size)
    profile.check_model(place, model, layout)
    return profile.source(ForestCurve, "forest") if forest else profile.source()


def import_profile(format: str, path: Path, gpu: Gpu | None, model: ModelSpec | None, engine: str = "") -> OperatorProfile:
    """The profile in another format's files. Raises ConfigError for an unknown format, ProfileError for what is in the files."""
    reader = _FORMATS.get(format)
    if reader is None:
        raise ConfigError(f"--format {format!r} is unknown; use one of {', '.join(_FORMATS)}")
    return reader(path, gpu, model, engine)


def _vidur(path: Path, gpu: Gpu | None, model: ModelSpec | None, _engine: str) -> OperatorProfile:
    return read_vidur(path, gpu, (model.name,) if model else ())


def _llmservingsim(path: Path, gpu: Gpu | None, model: ModelSpec | None, _engine: str) -> OperatorProfile:
    return read_llmservingsim(path, gpu, model)


def _aiconfigurator(path: Path, gpu: Gpu | None, _model: ModelSpec | None, engine: str) -> OperatorProfile:
    files = of_system(tables_in(path), gpu)
    if engine:
        files = [file for file in files if engine in file.parts or f"__{engine}__" in file.name or "nccl" in file.name]
        if not files:
            raise ProfileError(f"{path}: holds no table of {engine}; leave --engine out, or name another")
    return read_aiconfigurator(files, gpu, engine, path.name)


_FORMATS: dict[str, Callable[[Path, Gpu | None, ModelSpec | None, str], OperatorProfile]] = {
    "vidur": _vidur, "llmservingsim": _llmservingsim, "aiconfigurator": _aiconfigurator,
}  # fmt: skip
