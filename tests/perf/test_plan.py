import pytest
from msgspec.structs import replace

from squall.errors import ConfigError
from squall.perf.catalogue import resolve_model
from squall.perf.hardware import GPUS
from squall.perf.memory import Deployment, measure, missing_bytes
from squall.perf.plan import doubt, options

LLAMA, H100, WANTED = resolve_model("llama-3-70b"), GPUS["h100-sxm"], Deployment(max_model_len=8192)


def test_what_fits_has_room_for_the_longest_sequence_and_what_does_not_says_what_would() -> None:
    one, two, four = options(LLAMA, H100, WANTED, (1, 2, 4))
    assert one.obstacle
    assert "GB a GPU too small for one sequence of 8,192 tokens" in one.obstacle
    assert "--tp 2" in one.remedies
    assert two.obstacle is four.obstacle is None
    assert two.memory
    assert four.memory
    assert four.memory.kv_tokens > 10 * two.memory.kv_tokens > 10 * 8192


def test_every_remedy_is_true_and_the_smallest_of_its_kind() -> None:
    wanted = replace(WANTED, max_model_len=8192, gpu_memory_utilization=0.85)
    (option,) = options(LLAMA, H100, wanted, (2,))
    assert option.obstacle
    for remedy in option.remedies:
        key, value = remedy.removeprefix("--").split()[:2]
        name = {"context": "max_model_len"}.get(key, key.replace("-", "_"))
        changed: object = value if name.endswith("dtype") else float(value) if "." in value else int(value)
        changes: dict[str, object] = {"tp": 2, name: changed}
        assert not missing_bytes(measure(LLAMA, H100, replace(wanted, **changes))), remedy
    assert "--gpu-memory-utilization 0.95" in option.remedies
    assert "--tp 4" in option.remedies
    assert not any(remedy.startswith("--tp 8") for remedy in option.remedies)


def test_experts_may_be_dealt_out_to_make_a_mixture_fit() -> None:
    (option,) = options(resolve_model("mixtral-8x7b"), GPUS["a100-80g"], WANTED, (1,))
    assert "--ep 2" in option.remedies
    (dense,) = options(LLAMA, H100, WANTED, (1,))
    assert not any(remedy.startswith("--ep") for remedy in dense.remedies)


def test_a_share_that_cannot_be_is_a_row_as_long_as_another_can() -> None:
    one, two = options(resolve_model("smollm2"), GPUS["l4"], WANTED, (1, 2))
    assert one.obstacle is None
    assert two.memory is None
    assert two.obstacle == "the model cannot be shared evenly; tp 1, 3 can"
    with pytest.raises(ConfigError, match=r"replica.tp is 2, but .* 9 heads"):
        options(resolve_model("smollm2"), GPUS["l4"], WANTED, (2,))


def test_a_hopeless_case_has_no_remedy() -> None:
    tiny = replace(GPUS["t4"], memory_bytes=1 << 28)
    (option,) = options(LLAMA, tiny, replace(WANTED, dtype="fp16"), (1,))
    assert option.obstacle
    assert option.remedies == ()


def test_a_gpu_without_the_type_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"t4 computes no bf16, the type of .*; use replica.dtype = fp16"):
        options(LLAMA, GPUS["t4"], WANTED, (8,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 9000}, r"replica.max_model_len is 9000; .* knows 8192 positions at most"),
        ({"max_num_seqs": 0}, r"batching.max_num_seqs is 0; it must be at least 1"),
        ({"max_num_batched_tokens": -1}, r"batching.max_num_batched_tokens is -1"),
        ({"kv_dtype": "fp7"}, r"replica.kv_dtype 'fp7' is unknown"),
        ({"pp": 99}, r"replica.pp is 99, but .* has 80 layers"),
    ],
)
def test_a_senseless_setting_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(LLAMA, H100, replace(WANTED, **changes), (4,))


def test_a_name_that_promises_fewer_bits_than_the_files_declare_is_doubted() -> None:
    assert doubt(LLAMA) is None
    assert doubt(replace(LLAMA, name="nvidia/Llama-3.1-70B-Instruct-FP8")) == (
        "the name says fp8, but its config.json declares no quantisation: counted as bf16"
    )
    assert doubt(replace(resolve_model("deepseek-v3"), name="x-fp8")) is None
