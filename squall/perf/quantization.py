"""Which weights of a checkpoint are stored in fewer bits, and in how many, as its config.json says.

Knows no shapes. The name of a checkpoint is not trusted: only what its files declare counts. A method or a number of bits that
is not understood is refused by name, for a guess would be off by a factor of two or four.
"""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from msgspec import Struct

from squall.errors import ModelError
from squall.perf.dtypes import DTYPE_BYTES

EXCLUDING_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
METHODS = ("fp8", "fbgemm_fp8", "awq", "gptq", "mxfp4", "modelopt", "compressed-tensors")


class Quantization(Struct, frozen=True):
    """How the quantised matrices are stored.

    Attributes:
        dtype: "fp8", "int8", "int4", "mxfp4" or "nvfp4".
        scale_bytes: scales and zero points, in bytes a weight, that `dtype` does not count already.
        embeddings: embedding and head are quantised too (MLX); elsewhere they never are.
    """

    dtype: str
    scale_bytes: float = 0.0
    embeddings: bool = False

    @property
    def weight_bytes(self) -> float:
        """Bytes of one weight with its share of the scales."""
        return DTYPE_BYTES[self.dtype] + self.scale_bytes


class Exclusions(Struct, frozen=True):
    """The modules that stay unquantised, in our words for modules.

    Attributes:
        names: of modules, or whole words out of them ("lm_head", "layers.0.mlp").
        patterns: with `*`, or a regular expression after `re:`.
    """

    names: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.names or self.patterns)

    def cover(self, layer: int, module: str) -> bool:
        """Whether the module of that layer is excluded, or something that it is part of."""
        name = f"model.layers.{layer}.{module}"
        words = name.split(".")
        ends = range(1, len(words) + 1)
        return any(".".join(words[start:end]) in self.names for end in ends for start in range(end)) or any(
            _excludes(name, pattern) for pattern in self.patterns
        )


def read_quantization(config: Mapping[str, Any], place: str) -> tuple[Quantization | None, Exclusions]:
    """What a config.json says, and the modules that it excludes. Raises ModelError naming the field."""
    block = config.get("quantization_config")
    if isinstance(block, dict):
        at = f"{place}: quantization_config"
        return _by_method(block, at), _excluded(block, at)
    packed = config.get("quantization")
    if isinstance(packed, dict):
        return _mlx(packed, f"{place}: quantization"), Exclusions()
    return None, Exclusions()


def read_modelopt(file: Mapping[str, Any], place: str) -> tuple[Quantization | None, Exclusions]:
    """The same from the `hf_quant_config.json` that NVIDIA puts beside its checkpoints."""
    block = file.get("quantization")
    if not isinstance(block, dict):
        raise ModelError(f"{place}: quantization is missing; remove the file if the checkpoint is not quantised")
    return _modelopt(block, f"{place}: quantization"), _excluded(block, f"{place}: quantization")


def _by_method(block: Mapping[str, Any], at: str) -> Quantization | None:
    method = block.get("quant_method")
    match method:
        case "fp8":
            return Quantization("fp8", _fp8_scales(block, at))
        case "fbgemm_fp8":
            return Quantization("fp8")
        case "mxfp4":
            return Quantization("mxfp4")
        case "awq" | "gptq":
            bits = block.get("bits", block.get("w_bit"))
            if bits not in (4, 8):
                raise ModelError(f"{at}.bits is {bits!r}; only 4 and 8 are supported for {method}")
            return _integers(bits, block.get("group_size"), at)
        case "modelopt" | "modelopt_fp4":
            return _modelopt(block, at)
        case "compressed-tensors":
            return _compressed(block, at)
    raise ModelError(f"{at}.quant_method is {method!r}; supported are {', '.join(METHODS)}, or unquantised weights")


def _fp8_scales(block: Mapping[str, Any], at: str) -> float:
    """One 32-bit scale a block; none to speak of where a whole matrix has one."""
    size = block.get("weight_block_size")
    if size is None:
        return 0.0
    if not isinstance(size, list) or len(size) != 2 or not all(type(side) is int and side > 0 for side in size):
        raise ModelError(f"{at}.weight_block_size is {size!r}; it must be two whole numbers, such as [128, 128]")
    rows, columns = size
    return 4 / int(rows * columns)


def _integers(bits: int, group: Any, at: str) -> Quantization:
    """A 16-bit scale and a zero point for every `group` weights; -1 or absent: a whole column."""
    if group is None or group == -1:
        return Quantization(f"int{bits}")
    if type(group) is not int or group < 1:
        raise ModelError(f"{at}.group_size is {group!r}; it must be a whole number above 0, or -1 for whole columns")
    return Quantization(f"int{bits}", (2 + bits / 8) / group)


def _modelopt(block: Mapping[str, Any], at: str) -> Quantization | None:
    algorithm = block.get("quant_algo")
    if algorithm is None:
        return None
    known = {"FP8": "fp8", "NVFP4": "nvfp4", "W4A16_AWQ": "int4", "W4A8_AWQ": "int4", "INT8_SQ": "int8", "W8A8_SQ": "int8"}
    if algorithm not in known:
        raise ModelError(f"{at}.quant_algo is {algorithm!r}; supported are {', '.join(known)}")
    return _integers(4, block.get("group_size"), at) if known[algorithm] == "int4" else Quantization(known[algorithm])


def _compressed(block: Mapping[str, Any], at: str) -> Quantization:
    """The one kind that all groups share: mixed precision would need the shapes of each target."""
    groups = block.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    kinds = {(w.get("num_bits"), w.get("type"), w.get("group_size")) for w in weights if isinstance(w, dict)}
    if len(kinds) != 1 or not all(isinstance(w, dict) for w in weights):
        raise ModelError(f"{at}.config_groups has {len(kinds)} kinds of quantised weights; exactly one is supported")
    bits, kind, group = kinds.pop()
    match bits, kind, group:
        case (8, "float", _):
            return Quantization("fp8")
        case (4, "float", 16 | 32):
            return Quantization("nvfp4" if group == 16 else "mxfp4")
        case (4 | 8, "int", _):
            return _integers(bits, group, f"{at}.config_groups")
    raise ModelError(f"{at}.config_groups: {bits!r} bits of type {kind!r} are not supported; 8-bit and 4-bit weights are")


def _mlx(block: Mapping[str, Any], at: str) -> Quantization:
    """MLX keeps a 16-bit scale and a 16-bit offset for every group, of embedding and head as well."""
    bits, group = block.get("bits"), block.get("group_size", 64)
    if bits not in (4, 8):
        raise ModelError(f"{at}.bits is {bits!r}; supported are 4 and 8")
    if type(group) is not int or group < 1:
        raise ModelError(f"{at}.group_size is {group!r}; it must be a whole number above 0")
    return Quantization(f"int{bits}", 4 / group, embeddings=True)


# -- excluded modules

_SPELLINGS = (("language_model.", ""), ("block_sparse_moe", "mlp"), ("feed_forward", "mlp"), ("mlp.router", "mlp.gate"))


def _excluded(block: Mapping[str, Any], at: str) -> Exclusions:
    """Raises ModelError for what is no list of modules."""
    key = next((key for key in EXCLUDING_KEYS if block.get(key)), None)
    names = [] if key is None else block[key]
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{at}.{key} is {names!r}; it must be a list of module names")
    for name in names:
        if name.startswith("re:") and not _compiles(name[3:]):
            raise ModelError(f"{at}.{key} has {name!r}, which is no regular expression")
    spelled = [_in_our_words(name) for name in names]
    patterns = tuple(name for name in spelled if "*" in name or name.startswith("re:"))
    return Exclusions(frozenset(spelled) - frozenset(patterns), patterns)


def _compiles(expression: str) -> bool:
    try:
        re.compile(expression)
    except re.error:
        return False
    return True


def _in_our_words(pattern: str) -> str:
    for theirs, ours in _SPELLINGS:
        pattern = pattern.replace(theirs, ours)
    return pattern


def _excludes(name: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
