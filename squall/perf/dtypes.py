"""Number types and the bytes that a value of each takes. Knows no model and no hardware."""

from squall.errors import ConfigError

DTYPE_BYTES = {
    "fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5, "mxfp4": 0.5 + 1 / 32, "nvfp4": 0.5 + 1 / 16,
}  # fmt: skip
"""The 4-bit floats count one 8-bit scale for every 32 (OCP MX) or 16 (NVFP4) values; `Quantization` knows other scales."""

DTYPE_NAMES = {
    "float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8", "fp4": "nvfp4",
}  # fmt: skip


def dtype_name(dtype: str, place: str = "number type") -> str:
    """The short name of a number type ("bf16" for "bfloat16"). Raises ConfigError for an unknown one, which `place` asks for."""
    name = DTYPE_NAMES.get(dtype.removeprefix("torch."), dtype)
    if name not in DTYPE_BYTES:
        raise ConfigError(f"{place} {dtype!r} is unknown: use one of {', '.join(DTYPE_BYTES)}")
    return name


def dtype_bytes(dtype: str) -> float:
    """Bytes of one value. Raises ConfigError for an unknown type."""
    return DTYPE_BYTES[dtype_name(dtype)]
