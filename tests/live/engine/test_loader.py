"""Weights into an arena: from files, a host copy and peers, whole and in shards, always the same bytes."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from squall.errors import ModelError, TransferFailed
from squall.live.engine.architecture import read_decoder_config
from squall.live.engine.loader import Reading, load_from_disk, load_from_host, load_from_peers
from squall.live.engine.weights import Shard, Weights, allocate, pieces
from squall.live.transport.endpoint import Endpoint
from squall.live.transport.fetch import Source
from squall.live.transport.segment import HostCopies

CPU = torch.device("cpu")
READINGS: tuple[Reading, ...] = ("buffered", "direct", "mapped")


def room(folder: Path, dtype: torch.dtype = torch.float32, shard: Shard | None = None) -> Weights:
    return allocate(read_decoder_config(folder), dtype, CPU, shard or Shard(), chunk_bytes=4096)


def loaded(folder: Path, dtype: torch.dtype = torch.float32, shard: Shard | None = None, **how: object) -> Weights:
    weights = room(folder, dtype, shard)
    load_from_disk(weights, folder, tied=read_decoder_config(folder).tied, **how)  # type: ignore[arg-type]
    return weights


def test_sections_lie_one_after_the_other_each_at_a_page(tiny: Path) -> None:
    region = room(tiny).arena.region
    assert [section.name for section in region.sections] == ["embed", "layer 0", "layer 1", "layer 2", "norm", "head"]
    assert all(section.offset % 4096 == 0 for section in region.sections)
    ends = [section.offset + section.num_bytes for section in region.sections]
    assert all(0 <= after.offset - end < 4096 for end, after in zip(ends, region.sections[1:], strict=False))


def test_a_tied_head_has_no_section(checkpoint: Callable[..., Path]) -> None:
    weights = loaded(checkpoint(tie_word_embeddings=True))
    assert weights.arena.region.sections[-1].name == "norm"
    assert weights.head is weights.embed
    weights.arena.require(0, 3, embed=True, head=True)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("threads", [1, 3])
def test_all_ways_of_reading_give_the_checkpoint(tiny: Path, reading: Reading, threads: int) -> None:
    weights = loaded(tiny, reading=reading, threads=threads)
    stored = load_file(tiny / "model.safetensors")
    assert all(torch.equal(weights.views[name], tensor) for name, tensor in stored.items())
    assert weights.arena.complete


@pytest.mark.parametrize("reading", READINGS)
def test_numbers_are_converted(tiny: Path, reading: Reading) -> None:
    weights = loaded(tiny, torch.bfloat16, reading=reading)
    stored = load_file(tiny / "model.safetensors")
    assert all(torch.equal(weights.views[name], tensor.to(torch.bfloat16)) for name, tensor in stored.items())


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("size", [2, 4])
def test_shards_together_are_the_whole(tiny: Path, reading: Reading, size: int) -> None:
    stored = load_file(tiny / "model.safetensors")
    shards = [loaded(tiny, shard=Shard(rank, size), reading=reading) for rank in range(size)]
    kv_heads, dim = 2, 12
    for piece in pieces(read_decoder_config(tiny), Shard(0, size)):
        for part in piece.parts:
            views: list[Tensor] = [shard.views[part.name] for shard in shards]
            if part.shape == part.stored:
                assert all(torch.equal(view, stored[part.name]) for view in views)
            elif "k_proj" in part.name or "v_proj" in part.name:  # with 4 shards of 2 heads, two hold the same
                heads = stored[part.name].view(kv_heads, dim, -1)
                expected = [heads[rank * kv_heads // size][None] for rank in range(size)]
                assert all(torch.equal(view.view(1, dim, -1), head) for view, head in zip(views, expected, strict=True))
            else:
                assert torch.equal(torch.cat(views, dim=part.axis), stored[part.name])


def test_a_model_that_cannot_be_cut_so_is_refused(tiny: Path) -> None:
    with pytest.raises(ModelError, match=r"replica\.tp is 3, which does not divide .*'s 4 attention heads"):
        room(tiny, shard=Shard(0, 3))


def test_a_file_that_shrinks_while_it_is_read_is_said(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.preadv", lambda *_: 0)
    with pytest.raises(ModelError, match=r"ends at byte \d+, in the middle of a tensor"):
        loaded(tiny)


def test_the_second_worker_of_a_host_loads_the_firsts_copy(tiny: Path, tmp_path: Path) -> None:
    copies = HostCopies(folder=tmp_path)
    first, second = room(tiny), room(tiny)
    assert not load_from_host(first, copies, tiny, tied=False)
    assert load_from_host(second, copies, tiny, tied=False)
    assert bytes(first.arena.region.memory) == bytes(second.arena.region.memory)
    assert not load_from_host(room(tiny, torch.bfloat16), copies, tiny, tied=False)  # another copy
    copies.release()


@pytest.mark.parametrize("backend", [0, -1], ids=["shm", "tcp"])
def test_layers_are_ready_one_by_one_as_they_come_from_a_peer(tiny: Path, backend: int) -> None:
    there, here = room(tiny), room(tiny)
    source, target = Endpoint("source", "t", patience_s=5), Endpoint("target", "t", patience_s=5)
    try:
        source.register(there.arena.region)
        sources = [Source((source.addresses[backend],))]
        loading = threading.Thread(target=load_from_peers, args=(here, target, sources))
        loading.start()
        assert here.arena.layers_ready == 0
        with pytest.raises(TransferFailed, match="embed is needed, but has not arrived"):
            here.arena.require(0, 1, embed=True)
        content = loaded(tiny).arena.region
        for index, section in enumerate(content.sections):
            segment = (section.offset, section.num_bytes)
            there.arena.region.view(segment)[:] = content.view(segment)
            there.arena.region.publish(index)
            assert here.arena.wait(section.name, 10)
            assert here.arena.layers_ready == min(index, 3)
            assert here.arena.region.view(segment) == content.view(segment)
        loading.join()
        assert here.arena.complete
    finally:
        source.close()
        target.close()


def test_another_number_type_or_shard_is_refused_by_name_and_both_sides_say_so(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = Endpoint("source", "t"), Endpoint("target", "t")
    try:
        source.register(loaded(tiny).arena.region)
        for weights in (room(tiny, torch.bfloat16), room(tiny, shard=Shard(0, 2))):
            with pytest.raises(
                TransferFailed, match=r"source holds .* in float32, shard 0 of 1 .*; target wants .* in (bfloat|float)"
            ):
                load_from_peers(weights, target, [Source(source.addresses)])
        assert caplog.text.count("source refused target: source holds") == 2
        with pytest.raises(TransferFailed, match=r"source has no region 'weights 1'; it has weights$"):
            load_from_peers(room(tiny, shard=Shard(1, 2)), target, [Source(source.addresses)])
    finally:
        source.close()
        target.close()
