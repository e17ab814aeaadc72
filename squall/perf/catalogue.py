"""Well-known models, so that a name is enough. Knows nothing but their published sizes.

Each row restates the config.json that its publisher put on the Hugging Face hub under the name in the first column.
"""

import difflib
from functools import cache
from pathlib import Path
from typing import Any

from squall.errors import ModelError
from squall.perf.catalogue_mixed import MIXED
from squall.perf.model import ModelSpec, read_model, spec_from_config

_COLUMNS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip

# Hub name | family | layers | hidden | heads | KV heads | head_dim | MLP | vocabulary | positions | tied
_SIZES = """
HuggingFaceTB/SmolLM2-135M-Instruct   llama    30   576   9   3   64   1536   49152    8192  tied
HuggingFaceTB/SmolLM2-360M-Instruct   llama    32   960  15   5   64   2560   49152    8192  tied
HuggingFaceTB/SmolLM2-1.7B-Instruct   llama    24  2048  32  32   64   8192   49152    8192  tied
TinyLlama/TinyLlama-1.1B-Chat-v1.0    llama    22  2048  32   4   64   5632   32000    2048  -
meta-llama/Llama-2-7b-hf              llama    32  4096  32  32  128  11008   32000    4096  -
meta-llama/Llama-2-13b-hf             llama    40  5120  40  40  128  13824   32000    4096  -
meta-llama/Llama-2-70b-hf             llama    80  8192  64   8  128  28672   32000    4096  -
meta-llama/Meta-Llama-3-8B            llama    32  4096  32   8  128  14336  128256    8192  -
meta-llama/Meta-Llama-3-70B           llama    80  8192  64   8  128  28672  128256    8192  -
meta-llama/Llama-3.1-8B               llama    32  4096  32   8  128  14336  128256  131072  -
meta-llama/Llama-3.1-70B              llama    80  8192  64   8  128  28672  128256  131072  -
meta-llama/Llama-3.1-405B             llama   126 16384 128   8  128  53248  128256  131072  -
meta-llama/Llama-3.2-1B               llama    16  2048  32   8   64   8192  128256  131072  tied
meta-llama/Llama-3.2-3B               llama    28  3072  24   8  128   8192  128256  131072  tied
meta-llama/Llama-3.3-70B-Instruct     llama    80  8192  64   8  128  28672  128256  131072  -
codellama/CodeLlama-34b-Instruct-hf   llama    48  8192  64   8  128  22016   32000   16384  -
mistralai/Mistral-7B-v0.1             mistral  32  4096  32   8  128  14336   32000   32768  -
mistralai/Mistral-7B-Instruct-v0.3    mistral  32  4096  32   8  128  14336   32768   32768  -
mistralai/Mistral-Nemo-Instruct-2407  mistral  40  5120  32   8  128  14336  131072  131072  -
mistralai/Mistral-Small-24B-Instruct-2501  mistral  40  5120  32   8  128  32768  131072   32768  -
deepseek-ai/DeepSeek-R1-Distill-Llama-8B   llama    32  4096  32   8  128  14336  128256  131072  -
deepseek-ai/DeepSeek-R1-Distill-Llama-70B  llama    80  8192  64   8  128  28672  128256  131072  -
deepseek-ai/DeepSeek-R1-Distill-Qwen-7B    qwen2    28  3584  28   4  128  18944  152064  131072  -
internlm/internlm2_5-7b-chat          internlm2  32  4096  32   8  128  14336   92544   32768  -
internlm/internlm2-20b                internlm2  48  6144  48   8  128  16384   92544   32768  -
Qwen/Qwen2.5-0.5B-Instruct            qwen2    24   896  14   2   64   4864  151936   32768  tied
Qwen/Qwen2.5-7B-Instruct              qwen2    28  3584  28   4  128  18944  152064   32768  -
Qwen/Qwen2.5-1.5B-Instruct            qwen2    28  1536  12   2  128   8960  151936   32768  tied
Qwen/Qwen2.5-3B-Instruct              qwen2    36  2048  16   2  128  11008  151936   32768  tied
Qwen/Qwen2.5-14B-Instruct             qwen2    48  5120  40   8  128  13824  152064   32768  -
Qwen/Qwen2.5-32B-Instruct             qwen2    64  5120  40   8  128  27648  152064   32768  -
Qwen/Qwen2.5-72B-Instruct             qwen2    80  8192  64   8  128  29568  152064   32768  -
Qwen/Qwen3-0.6B                       qwen3    28  1024  16   8  128   3072  151936   40960  tied
Qwen/Qwen3-1.7B                       qwen3    28  2048  16   8  128   6144  151936   40960  tied
Qwen/Qwen3-4B                         qwen3    36  2560  32   8  128   9728  151936   40960  tied
Qwen/Qwen3-8B                         qwen3    36  4096  32   8  128  12288  151936   40960  -
Qwen/Qwen3-14B                        qwen3    40  5120  40   8  128  17408  151936   40960  -
Qwen/Qwen3-32B                        qwen3    64  5120  64   8  128  25600  151936   40960  -
microsoft/Phi-3-mini-4k-instruct      phi3     32  3072  32  32   96   8192   32064    4096  -
microsoft/Phi-3.5-mini-instruct       phi3     32  3072  32  32   96   8192   32064  131072  -
microsoft/phi-4                       phi3     40  5120  40  10  128  17920  100352   16384  -
microsoft/Phi-4-mini-instruct         phi3     32  3072  24   8  128   8192  200064  131072  tied
"""

_WINDOWS = {"mistralai/Mistral-7B-v0.1": 4096, "microsoft/Phi-3-mini-4k-instruct": 2047}

_ALIASES = {
    "smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-2-13b": "meta-llama/Llama-2-13b-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-hf",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B",
    "meta-llama/meta-llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "meta-llama/meta-llama-3.1-70b": "meta-llama/Llama-3.1-70B",
    "llama-3.3-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "codellama-34b": "codellama/CodeLlama-34b-Instruct-hf",
    "mistral-7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "mistral-nemo": "mistralai/Mistral-Nemo-Instruct-2407",
    "mistral-small-24b": "mistralai/Mistral-Small-24B-Instruct-2501",
    "mistral-24b": "mistralai/Mistral-Small-24B-Instruct-2501",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B-Instruct",
    "qwen2.5-14b": "Qwen/Qwen2.5-14B-Instruct",
    "qwen2.5-32b": "Qwen/Qwen2.5-32B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2.5-72b": "Qwen/Qwen2.5-72B-Instruct",
    "phi-3-mini": "microsoft/Phi-3-mini-4k-instruct",
    "phi-3.5-mini": "microsoft/Phi-3.5-mini-instruct",
    "phi-4-mini": "microsoft/Phi-4-mini-instruct",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "mixtral-8x22b": "mistralai/Mixtral-8x22B-v0.1",
}


def _config(row: str) -> tuple[str, dict[str, Any]]:
    """The hub name and the config.json that a line of the table stands for."""
    name, family, *sizes, tied = row.split()
    config: dict[str, Any] = dict(zip(_COLUMNS, map(int, sizes), strict=True))
    return name, config | {"model_type": family, "tie_word_embeddings": tied == "tied", "sliding_window": _WINDOWS.get(name)}


CONFIGS: dict[str, dict[str, Any]] = dict(map(_config, _SIZES.strip().splitlines())) | MIXED
"""By the name on the hub."""


@cache  # a command wants one model, and reading all takes as long as a short simulation
def _model(name: str) -> ModelSpec:
    return spec_from_config(CONFIGS[name], place=f"the catalogue's {name}", name=name)


def _known_as() -> dict[str, str]:
    """Every spelling in lower case: the hub name, its last part, that without "-instruct" where the base model has no row."""
    known = {name.lower(): name for name in CONFIGS}
    for name in CONFIGS:
        known.setdefault(name.lower().rpartition("/")[2], name)
    for name in CONFIGS:
        if not name.lower().endswith("-instruct"):
            known.setdefault(f"{name.lower()}-instruct", name)
            known.setdefault(f"{name.lower().rpartition('/')[2]}-instruct", name)
    return known | _ALIASES


KNOWN_AS: dict[str, str] = _known_as()


def resolve_model(name: str) -> ModelSpec:
    """The sizes behind a catalogue name (upper and lower case alike), a config.json or a checkpoint directory.

    A path that holds a config.json goes first. Raises ModelError, with close matches for an unknown name.
    """
    path = Path(name).expanduser()
    if path.is_file() or (path / "config.json").is_file():
        return read_model(path)
    known = KNOWN_AS.get(name.lower())
    if known is not None:
        return _model(known)
    if path.is_dir():
        return read_model(path)
    close = difflib.get_close_matches(name.lower(), KNOWN_AS, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(close)}?" if close else f"known are {', '.join(sorted(_ALIASES))}, ..."
    raise ModelError(f"model.name {name!r} is neither a known model nor a path to a config.json: {hint}")
