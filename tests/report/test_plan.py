import sys
from pathlib import Path

import pytest

from squall.cli import main
from squall.perf.catalogue import resolve_model
from squall.perf.hardware import GPUS
from squall.perf.memory import Deployment
from squall.perf.plan import options
from squall.report.plan import plan_lines


def table(model: str, gpu: str, *tps: int) -> list[str]:
    spec, sheet = resolve_model(model), GPUS[gpu]
    return list(plan_lines(spec, sheet, options(spec, sheet, Deployment(max_model_len=8192), tps)))


def test_a_row_for_every_share_and_a_line_for_what_would_help() -> None:
    lines = table("llama-3-70b", "h100-sxm", 1, 2)
    assert lines[0].startswith(
        "meta-llama/Meta-Llama-3-70B: 70.55 billion parameters, 80 layers, weights in bf16, attention, 327,680"
    )
    assert lines[1].startswith("h100-sxm: 79.2 GiB, 989 TFLOPS, 3,350 GB/s, nvlink at 450 GB/s, 700 W, 2.95 USD/h")
    head, one, two = (line.split() for line in lines[4:7])
    assert head[:3] == ["tp", "GPUs", "weights"]
    assert one[:3] == ["1", "1", "141.1"]
    assert "does not fit" in lines[5]
    assert two[:3] == ["2", "2", "70.6"]
    assert two[-1] == "fits"
    assert lines[7].startswith("tp 1 would fit with any of: ")


def test_columns_are_aligned() -> None:
    lines = table("smollm2", "l4", 1, 2, 3)
    ends = {line.index(word) for line, word in zip(lines[5:8], ("fits", "impossible", "fits"), strict=True)}
    assert len(ends) == 1


def test_experts_windows_and_latent_attention_are_told() -> None:
    assert "(8 of 256 experts), 61 layers, weights in fp8, latent attention, 70,272 bytes" in table("deepseek-v3", "h200", 8)[0]
    assert "attention in 36 layers, of which 18 look back 128 tokens" in table("gpt-oss-120b", "h100-sxm", 1)[0]


def test_the_command_prints_tp_1_2_4_and_8(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["squall", "plan", "llama-3-70b", "--gpu", "h100-sxm"])
    with pytest.raises(SystemExit) as end:
        main()
    out, _ = capsys.readouterr()
    assert not end.value.code
    assert [line.split()[0] for line in out.splitlines()[5:9]] == ["1", "2", "4", "8"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "llama-9", "--gpu", "l4"], "MODEL 'llama-9' is neither"),
        (["plan", "smollm2", "--gpu", "l5"], "--gpu 'l5' is unknown: did you mean l4"),
        (["plan", "smollm2", "--gpu", "l4", "--context", "9000"], "--context is 9000"),
        (["plan", "smollm2", "--gpu", "l4", "--tp", "2"], "--tp is 2, but"),
        (["plan", "smollm2", "--gpu", "l4", "--pp", "31"], "--pp is 31, but"),
        (["plan", "mixtral-8x7b", "--gpu", "l4", "--ep", "3"], "--ep is 3, but"),
        (["plan", "smollm2", "--gpu", "l4", "--dtype", "fp7"], "--dtype 'fp7' is unknown: use one of fp32, bf16"),
        (["plan", "smollm2", "--gpu", "l4", "--kv-dtype", "fp7"], "--kv-dtype 'fp7' is unknown: use one of fp32, bf16"),
        (["plan", "llama-3-8b", "--gpu", "t4"], "use --dtype fp16"),
        (["plan", "smollm2", "--gpu", "l4", "--block-size", "0"], "--block-size is 0; it must"),
        (["plan", "smollm2", "--gpu", "l4", "--gpu-memory-utilization", "2"], "--gpu-memory-utilization is 2.0; it must"),
        (["plan", "smollm2", "--gpu", "l4", "--max-num-seqs", "0"], "--max-num-seqs is 0; it must"),
        (["plan", "smollm2", "--gpu", "l4", "--max-num-batched-tokens", "0"], "--max-num-batched-tokens is 0; it must"),
        (["latency", "llama-9", "--gpu", "l4"], "MODEL 'llama-9' is neither"),
        (["latency", "smollm2", "--gpu", "l5"], "--gpu 'l5' is unknown: did you mean l4"),
        (["latency", "smollm2", "--gpu", "l4", "--tp", "2"], "--tp is 2, but"),
        (["latency", "smollm2", "--gpu", "l4", "--set", "replica.dtype=fp7"], "replica.dtype = 'fp7': unknown value"),
        (["profile", "import", "x", "--format", "vidur", "--out", "new", "--gpu", "l5"], "--gpu 'l5' is unknown"),
    ],
)
def test_an_error_is_one_line_and_names_what_was_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["squall", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_the_page_on_hardware_shows_what_the_command_prints() -> None:
    page = (Path(__file__).parents[2] / "docs" / "hardware.md").read_text()
    shown = page.partition("$ squall plan llama-3-70b --gpu h100-sxm\n")[2].partition("```")[0]
    assert shown.splitlines() == table("llama-3-70b", "h100-sxm", 1, 2, 4, 8)
