"""What an installation without extras lacks: by the name that an import fails with, and how to get it. Knows no command."""

from typing import Final

SERVE: Final = frozenset({
    "torch", "starlette", "uvicorn", "httptools", "uvloop", "grpc", "grpc_health", "google", "safetensors", "tokenizers",
    "jinja2", "prometheus_client", "gguf", "xxhash",
})  # fmt: skip
"""What `squall[serve]` brings."""


def install(extra: str) -> str:
    """How to get it."""
    return f"pip install 'squall[{extra}]', or in a clone pip install -c constraints.txt '.[{extra}]'"


INSTALL: Final = install("serve")


def missing(error: ModuleNotFoundError) -> str | None:
    """The package that is missing, where it is one of `squall[serve]`; None where it should be there."""
    name = str(error.name).partition(".")[0]
    return name if name in SERVE else None
