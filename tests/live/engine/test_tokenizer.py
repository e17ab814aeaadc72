"""Tokenizers of both spellings (byte-level and byte fallback), and chat templates in their sandbox."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from squall.errors import ModelError, RequestError
from squall.live.engine.tokenizer import ByteTokenizer, HfTokenizer

TEXT = "The quick brown fox, 123 times:\n\tnaïve café — 😀 日本語 \u00ad\x00"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n"
    "    {%- if m.role == 'nobody' %}{{ raise_exception('no such role: ' + m.role) }}{% endif %}\n"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}\n"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def save(folder: Path, tokenizer: Tokenizer, **settings: Any) -> Path:
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}, **settings}))
    return folder


@pytest.fixture
def byte_level(tmp_path: Path) -> Path:
    """As GPT-2, Llama 3 and Qwen spell their tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False))
    return save(tmp_path, tokenizer, chat_template=TEMPLATE)


@pytest.fixture
def byte_fallback(tmp_path: Path) -> Path:
    """As Llama 2 and Mistral spell their tokens."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"Thequickbrwn", "▁T", "qu", "▁qu"]
    merges = [("▁", "T"), ("q", "u"), ("▁", "qu")]
    vocabulary = {piece: id for id, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    return save(tmp_path, tokenizer)


@pytest.mark.parametrize("spelling", ["byte_level", "byte_fallback"])
def test_the_bytes_of_tokens_add_up_to_the_text(spelling: str, request: pytest.FixtureRequest) -> None:
    tokenizer = HfTokenizer(request.getfixturevalue(spelling))
    tokens = tokenizer.encode(TEXT)
    assert b"".join(map(tokenizer.token_bytes, tokens)) == TEXT.encode()
    assert tokenizer.decode(tokens) == TEXT
    assert len(tokens) < len(TEXT.encode())
    assert max(tokens) < tokenizer.vocab_size


@pytest.mark.parametrize("spelling", ["byte_level", "byte_fallback"])
def test_special_tokens_are_known_and_spelt_by_their_name(spelling: str, request: pytest.FixtureRequest) -> None:
    tokenizer = HfTokenizer(request.getfixturevalue(spelling))
    begin, tool, letter, end = tokenizer.encode("<s><tool>q</s>")
    assert [tokenizer.is_special(token) for token in (begin, tool, letter, end)] == [True, False, False, True]
    assert [tokenizer.token_bytes(token) for token in (begin, tool, end)] == [b"<s>", b"<tool>", b"</s>"]
    assert tokenizer.eos_token_ids == {end}
    assert tokenizer.token_bytes(1_000_000) == b""


def test_everything_that_ends_a_sequence_counts(byte_level: Path) -> None:
    (byte_level / "config.json").write_text('{"vocab_size": 512, "eos_token_id": 9}')
    tokenizer = HfTokenizer(byte_level)
    (end,) = tokenizer.encode("</s>")
    assert tokenizer.eos_token_ids == {9, end}
    assert tokenizer.vocab_size == 512
    (byte_level / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert HfTokenizer(byte_level).eos_token_ids == {7, 8, end}


def test_a_token_that_the_model_does_not_know_is_the_clients_error(byte_level: Path) -> None:
    (end,) = HfTokenizer(byte_level).encode("</s>")
    (byte_level / "config.json").write_text(json.dumps({"vocab_size": end}))
    tokenizer = HfTokenizer(byte_level)
    assert tokenizer.encode("quick")
    with pytest.raises(RequestError, match="the text holds '</s>', a token that this model has no embedding for"):
        tokenizer.encode("quick</s>")


def test_a_chat_becomes_a_prompt(byte_level: Path) -> None:
    tokenizer = HfTokenizer(byte_level)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert tokenizer.render_chat(messages) == "<s>[user] Hi\n[assistant] Ho\n[assistant]"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == "<s>[user] Hi\n[assistant] Ho\n"


def test_a_template_of_its_own_file_comes_first_and_a_list_has_a_default(byte_level: Path) -> None:
    settings = byte_level / "tokenizer_config.json"
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    settings.write_text(json.dumps({"chat_template": templates}))
    assert HfTokenizer(byte_level).render_chat([]) == "plain"
    (byte_level / "chat_template.jinja").write_text("from a file")
    assert HfTokenizer(byte_level).render_chat([]) == "from a file"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ tools is none }} {{ extra }} {{ bos_token }}", "True given <s>"),
    ],
)
def test_templates_find_what_they_are_used_to(template: str, expected: str, byte_level: Path) -> None:
    (byte_level / "chat_template.jinja").write_text(template)
    assert HfTokenizer(byte_level).render_chat([], extra="given") == expected


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (TEMPLATE, "refuses these messages: no such role: nobody"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ raise_exception.__globals__.json }}", "SecurityError"),
        ("{{ messages[5].content }}", "UndefinedError"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{% for i in range(999999999) %}{% endfor %}", "OverflowError"),
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_the_clients_error(template: str, reason: str, byte_level: Path) -> None:
    (byte_level / "chat_template.jinja").write_text(template)
    with pytest.raises(RequestError, match=reason) as caught:
        HfTokenizer(byte_level).render_chat([{"role": "nobody", "content": "x"}])
    assert (caught.value.param, caught.value.status) == ("messages", 400)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ raise_exception('a\\nb') }}"]
)
def test_whatever_a_template_comes_to_is_one_line_for_the_client(template: str, byte_level: Path) -> None:
    (byte_level / "chat_template.jinja").write_text(template)
    with pytest.raises(RequestError) as caught:
        HfTokenizer(byte_level).render_chat([{"role": "user", "content": "hi"}])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("chat_template.jinja", b"\xff", "chat_template.jinja: not readable as a chat template"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "chat_template is a int, expected a text"),
        ("tokenizer_config.json", b'{"chat_template": {"a": 1}}', "chat_template is a dict, expected a text"),
        ("tokenizer_config.json", b"[" * 100_000, "not readable as JSON"),
        ("generation_config.json", b'{"eos_token_id": "x"}', "eos_token_id is 'x'"),
        ("generation_config.json", b'{"eos_token_id": [null]}', "eos_token_id is [None]"),
    ],
)
def test_a_strange_file_is_named(file: str, content: bytes, message: str, byte_level: Path) -> None:
    (byte_level / file).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        HfTokenizer(byte_level)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_list_of_templates_without_a_usable_default_is_none(byte_level: Path) -> None:
    (byte_level / "tokenizer_config.json").write_text(
        '{"chat_template": [5, {"name": "default"}, {"name": "tool", "template": "x"}]}'
    )
    with pytest.raises(RequestError, match="no chat template"):
        HfTokenizer(byte_level).render_chat([{"role": "user", "content": "hi"}])


def test_a_model_without_a_template_says_so(byte_fallback: Path) -> None:
    with pytest.raises(RequestError, match="no chat template; use /v1/completions"):
        HfTokenizer(byte_fallback).render_chat([])


def test_broken_files_are_named(byte_level: Path) -> None:
    (byte_level / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: the chat template does not compile"):
        HfTokenizer(byte_level)
    (byte_level / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a readable tokenizer"):
        HfTokenizer(byte_level)
    (byte_level / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json: missing"):
        HfTokenizer(byte_level)


def test_bytes_are_tokens_where_there_is_no_checkpoint() -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode("é")
    assert tokens == [256, 0xC3, 0xA9]
    assert tokenizer.decode([*tokens, 257]) == "é"
    assert tokenizer.decode([*tokens, 257], skip_special_tokens=False) == "<|begin|>é<|end|>"
    assert tokenizer.encode("é", add_special_tokens=False) == tokens[1:]
    assert tokenizer.eos_token_ids == {257}
    assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == "user: Hi\nassistant: "
