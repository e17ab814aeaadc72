"""The native kernels against PyTorch, and what happens without them."""

import logging
import stat
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from squall.live.engine.attention import attend_one_by_one, attend_together, rope_store
from squall.live.engine.kernels import Kernels, load_kernels
from squall.live.home import home


@pytest.fixture
def noise() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("k", [64, 70, 5])
@pytest.mark.parametrize("m", range(1, 16))
def test_a_narrow_product_is_that_of_pytorch(m: int, k: int, kernels: Kernels, noise: torch.Generator) -> None:
    x, w = torch.randn(m, k, generator=noise), torch.randn(12, k, generator=noise)
    bias = torch.randn(12, generator=noise)
    assert kernels.suits(x, w)
    torch.testing.assert_close(kernels.linear(x, w, bias), F.linear(x, w, bias), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kernels.linear(x, w, None), F.linear(x, w), atol=1e-5, rtol=1e-5)


def test_a_row_of_a_product_does_not_depend_on_the_other_rows(kernels: Kernels, noise: torch.Generator) -> None:
    x, w = torch.randn(15, 100, generator=noise), torch.randn(20, 100, generator=noise)
    together = kernels.linear(x, w, None)
    for size in (1, 2, 3, 5, 8, 12):
        assert torch.equal(kernels.linear(x[:size], w, None), together[:size])


@pytest.mark.parametrize("window", [0, 1, 13])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"), [(9, 3, 64, 16), (4, 4, 12, 5), (8, 1, 6, 1), (4, 2, 128, 32)]
)
def test_attention_over_blocks_is_attention(
    heads: int, kv_heads: int, dim: int, block_size: int, window: int, kernels: Kernels, noise: torch.Generator
) -> None:
    lengths = torch.tensor([1, 2, 15, 16, 17, 90, 33], dtype=torch.int32)
    width = -(-90 // block_size)
    keys, values = (torch.randn(7 * width, block_size, kv_heads, dim, generator=noise) for _ in range(2))
    tables = torch.randperm(7 * width, generator=noise).view(7, width).to(torch.int32)
    qkv = torch.randn(7, heads + 2 * kv_heads, dim, generator=noise)
    scores = torch.empty(heads, 90 + block_size + 8)
    found = kernels.attend(qkv, keys, values, tables, lengths, scores, window)
    for row, length in enumerate(lengths.tolist()):
        first = max(0, length - window) if window else 0
        k, v = (pool[tables[row].long()].view(-1, kv_heads, dim)[first:length].transpose(0, 1) for pool in (keys, values))
        expected = F.scaled_dot_product_attention(qkv[row, :heads].unsqueeze(1), k, v, enable_gqa=True).squeeze(1)
        torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=1e-5)
    for fallback in (attend_one_by_one, attend_together):
        torch.testing.assert_close(fallback(qkv[:, :heads], keys, values, tables, lengths, window), found, atol=1e-5, rtol=1e-5)


def test_attention_survives_large_scores(kernels: Kernels) -> None:
    qkv = torch.full((1, 3, 8), 40.0)
    keys = torch.linspace(-40, 40, 3 * 8).view(3, 1, 1, 8).contiguous()
    values = torch.eye(3, 8).view(3, 1, 1, 8).contiguous()
    tables, lengths = torch.arange(3, dtype=torch.int32).unsqueeze(0), torch.tensor([3], dtype=torch.int32)
    found = kernels.attend(qkv, keys, values, tables, lengths, torch.empty(1, 12), 0)
    torch.testing.assert_close(found, attend_one_by_one(qkv[:, :1], keys, values, tables, lengths, 0))


def test_rope_store_is_that_of_pytorch(kernels: Kernels, noise: torch.Generator) -> None:
    angle = torch.randn(5, 6, generator=noise)
    slots = torch.tensor([9, 0, 4, 19, 7])
    qkv = torch.randn(5, 8, 12, generator=noise)
    results = []
    for store in (kernels.rope_store, rope_store):
        mine, keys, values = qkv.clone(), torch.zeros(5, 4, 2, 12), torch.zeros(5, 4, 2, 12)
        store(mine, angle.cos(), angle.sin(), slots, keys, values)
        results.append((mine, keys, values))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert results[0][1].view(-1, 2, 12)[slots].abs().min() > 0


def test_they_are_compiled_once_and_kept(kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUALL_HOME", str(tmp_path))
    assert load_kernels() is not None
    (built,) = (home() / "kernels").iterdir()
    before = built.stat().st_mtime_ns
    assert load_kernels() is not None
    assert built.stat().st_mtime_ns == before


def test_without_a_compiler_there_are_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.INFO):
        assert load_kernels() is None
    assert "no C++ compiler" in caplog.text


def test_a_compiler_that_fails_is_reported_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\necho 'unknown option -march' >&2\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("SQUALL_HOME", str(tmp_path / "home"))
    assert load_kernels() is None
    assert "native kernels are off: unknown option -march" in caplog.text
    assert list((tmp_path / "home" / "kernels").iterdir()) == []
