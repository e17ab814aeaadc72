"""The model that a configuration asks to serve, as head and workers need it. Knows files and sizes, no weights and no torch.

A real engine needs a checkpoint; an emulated one is content with the catalogue's sizes, and then speaks in bytes.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from squall.config import Config
from squall.errors import ConfigError, ModelError
from squall.live.engine.tokenizer import ByteTokenizer, HfTokenizer, Tokenizer
from squall.live.models import find
from squall.perf.catalogue import resolve_model
from squall.perf.model import ModelSpec, read_model


class ServedModel(Struct, frozen=True):
    """What is served.

    Attributes:
        names: that clients may use; the first is the canonical one.
        folder: the checkpoint; None where only the sizes are known, or nothing else is in it.
        max_model_len: the longest prompt plus output, in tokens.
    """

    names: tuple[str, ...]
    spec: ModelSpec
    folder: Path | None
    max_model_len: int

    def tokenizer(self) -> Tokenizer:
        """The checkpoint's, or one token a byte where there is none. Raises ModelError."""
        return ByteTokenizer() if self.folder is None else HfTokenizer(self.folder)


def served_model(config: Config) -> ServedModel:
    """Find the model of `config`. Raises ModelError or ConfigError."""
    name = config.model.name
    try:
        folder: Path | None = find(name)
    except ModelError:
        if config.serve.engine != "emulated":
            raise
        folder = None
    spec = resolve_model(name) if folder is None else read_model(folder)
    longest = config.replica.max_model_len or spec.max_position
    if longest > spec.max_position:
        raise ConfigError(f"replica.max_model_len is {longest}; {spec.name} knows {spec.max_position} positions at most")
    own_name = Path(name).name if folder is not None and Path(name).expanduser().exists() else name
    if config.serve.engine == "emulated" and folder is not None and not (folder / "tokenizer.json").is_file():
        folder = None
    return ServedModel(config.model.served_as or (own_name,), spec, folder, longest)
