"""A small checkpoint of random weights that a worker process can serve: eight megabytes, eight layers."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from squall.live.engine.architecture import read_decoder_config
from squall.live.engine.weights import pieces

VOCABULARY = 300
NUM_LAYERS = 8

SIZES = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "eos_token_id": 299,
}


def write_checkpoint(folder: Path) -> Path:
    """config.json, tokenizer.json and model.safetensors, the same at every call."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SIZES))
    words = {f"w{number}": number for number in range(VOCABULARY)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for piece in pieces(read_decoder_config(folder)):
        for part in piece.parts:
            norm = len(part.stored) == 1
            drawn = torch.randn(part.stored, generator=generator) * 0.1
            tensors[part.name] = 1 + drawn if norm else drawn
    save_file(tensors, folder / "model.safetensors")
    return folder
