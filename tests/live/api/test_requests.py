"""Fields: what is accepted, what is refused and how, and that nothing a client sends is ever our mistake."""

import threading
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from squall.live.api.fields import shown


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": "hot"}, "temperature: expected a number between 0 and 2, got 'hot'"),
        ({"temperature": -0.1}, "temperature: expected a number between 0 and 2, got -0.1"),
        ({"temperature": True}, "temperature: expected a number between 0 and 2, got true"),
        ({"top_p": 1.5}, "top_p: expected a number between 0 and 1, got 1.5"),
        ({"top_k": -2}, "top_k: expected an integer between -1 and 2147483647, got -2"),
        ({"top_k": 1.5}, "top_k: expected an integer between -1 and 2147483647, got 1.5"),
        ({"min_p": 2}, "min_p: expected a number between 0 and 1, got 2"),
        (
            {"seed": 1 << 63},
            "seed: expected an integer between -9223372036854775808 and 9223372036854775807, got 9223372036854775808",
        ),
        ({"n": 0}, "n: expected an integer between 1 and 128, got 0"),
        ({"n": 129}, "n: expected an integer between 1 and 128, got 129"),
        ({"max_tokens": 0}, "max_tokens: expected an integer of at least 1, got 0"),
        ({"max_tokens": "8"}, "max_tokens: expected an integer of at least 1, got '8'"),
        (
            {"max_tokens": 10**40},
            "max_tokens: expected an integer between 1 and 9223372036854775807, got a number of more than 38 digits",
        ),
        ({"min_tokens": 9}, "min_tokens: 9 is more than the 8 tokens that may be generated"),
        ({"presence_penalty": 2.5}, "presence_penalty: expected a number between -2 and 2, got 2.5"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected a number between 0.01 and 100, got 0"),
        ({"logprobs": 5}, "logprobs: expected true or false, got 5"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: expected an integer between 0 and 20, got 21"),
        ({"stream": "yes"}, "stream: expected true or false, got 'yes'"),
        ({"ignore_eos": 1}, "ignore_eos: expected true or false, got 1"),
        ({"logit_bias": []}, "logit_bias: expected an object of token ids and biases, got an empty array"),
        ({"model": 7}, "model: expected a string, got 7"),
        ({"model": None}, "model: missing; GET /v1/models lists the names"),
        ({"model": "gpt"}, "model: 'gpt' is not served here; 'small', 'small/alias' is"),
        (
            {"max_tokens": 4, "max_completion_tokens": 5},
            "max_tokens: 4 contradicts max_completion_tokens = 5; send one of them",
        ),
        ({"prompt_cache_key": 7}, "prompt_cache_key: expected a string, got 7"),
        (
            {"chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs: expected an object without self, messages and add_generation_prompt, got an object",
        ),
    ],
)
async def test_a_wrong_field_is_400_and_the_message_says_what_would_be_right(chat: Any, fields: Any, message: str) -> None:
    answer = await chat(**fields)
    error = answer.json()["error"]
    assert error["message"] == message
    assert error["param"] == message.partition(":")[0]
    assert answer.status_code == (404 if error["code"] == "model_not_found" else 400)
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": 6}, "logprobs: expected an integer between 0 and 5, got 6"),
        ({"logprobs": True}, "logprobs: expected an integer between 0 and 5, got true"),
        ({"n": 3, "best_of": 2}, "best_of: 2 is less than n = 3"),
        ({"best_of": 3, "stream": True}, "best_of: cannot be streamed, as the best is known only at the end"),
        ({"suffix": "end"}, "suffix: not supported"),
        ({"echo": "x"}, "echo: expected true or false, got 'x'"),
        (
            {"prompt": ["x"] * 100, "n": 128},
            "n: 100 prompts of 128 choices each are more than the 2048 that one request may ask for",
        ),
    ],
)
async def test_a_wrong_field_of_a_completion_is_400(complete: Any, fields: Any, message: str) -> None:
    answer = await complete(**fields)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt": [65] * 600 + ["not looked at"]}, "context_length_exceeded"),
        ({"prompt": [[65], [65] * 600 + ["not looked at"]]}, "context_length_exceeded"),
        ({"prompt": ["not tokenised"] * 3000}, "invalid_value"),
        ({"prompt": [["not looked at"]] * 3000}, "invalid_value"),
        ({"stop": "x" * 1025}, "invalid_value"),
        ({"stop_token_ids": ["not looked at"] * 300}, "invalid_value"),
        ({"logit_bias": {f"not looked at {i}": 1 for i in range(300)}}, "invalid_value"),
    ],
)
async def test_what_is_too_long_is_refused_before_each_of_its_parts_is_looked_at(
    complete: Any, head: Any, monkeypatch: pytest.MonkeyPatch, fields: Any, code: str
) -> None:
    if isinstance(fields.get("prompt"), list):
        monkeypatch.setattr(head.tokenizer, "encode", None)
    answer = await complete(**fields)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    assert "not looked at" not in answer.text


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "a"}] * 512 + ["not looked at"],
        [{"role": "user", "content": [{"type": "text", "text": "a"}] * 512 + ["not looked at"]}],
    ],
)
async def test_more_messages_than_the_context_has_tokens_are_refused_unread(chat: Any, messages: Any) -> None:
    error = (await chat(messages=messages)).json()["error"]
    assert error["message"] == "messages: 513 messages or parts of them do not fit the context of 512 tokens"
    assert error["code"] == "context_length_exceeded"


async def test_long_texts_and_many_are_tokenised_beside_the_loop(complete: Any, head: Any, client: Any) -> None:
    threads: set[int] = set()
    encode = head.tokenizer.encode

    def noted(text: str, *, add_special_tokens: bool = True) -> Any:
        threads.add(threading.get_ident())
        return encode(text, add_special_tokens=add_special_tokens)

    head.tokenizer.encode = noted
    assert (await complete(prompt=["a" * 19_000] * 2)).status_code == 400
    assert (await client.post("/tokenize", json={"prompt": "a" * 30_000})).json()["count"] == 30_001
    assert threads
    assert threading.get_ident() not in threads
    back = await client.post("/detokenize", json={"tokens": [97] * 30_000})
    assert back.json() == {"prompt": "a" * 30_000}


async def test_every_sampling_field_reaches_the_engine(chat: Any, head: Any) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 11, "stop": ["x"], "stop_token_ids": [1, 2],
        "ignore_eos": True, "min_tokens": 2, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.25,
        "logit_bias": {"1": 2}, "skip_special_tokens": False, "max_tokens": 3,
    }  # fmt: skip
    await chat(**fields, logprobs=True, top_logprobs=4)
    sampling = msgspec.structs.asdict(head.submitted[-1][1])
    expected = {**fields, "stop": ("x",), "stop_token_ids": (1, 2), "logit_bias": {1: 2.0}, "logprobs": 4}
    assert sampling == expected


async def test_defaults_are_those_of_the_specification(chat: Any, complete: Any, head: Any) -> None:
    await chat(max_tokens=None)
    prompt, sampling = head.submitted[-1]
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (1.0, 1.0, 0, ())
    assert sampling.max_tokens == 512 - len(prompt)
    await complete(max_tokens=None)
    assert head.submitted[-1][1].max_tokens == 16
    await complete(max_tokens=None, prompt=[65] * 510)
    assert head.submitted[-1][1].max_tokens == 2
    await complete(top_k=-1)
    assert head.submitted[-1][1].top_k == 0


async def test_the_newer_name_of_max_tokens_wins(chat: Any, head: Any) -> None:
    await chat(max_tokens=None, max_completion_tokens=5)
    assert head.submitted[-1][1].max_tokens == 5
    await chat(max_tokens=5, max_completion_tokens=5)
    assert head.submitted[-1][1].max_tokens == 5


async def test_null_means_absent(chat: Any) -> None:
    names = ("temperature", "top_p", "n", "stop", "stream", "seed", "logprobs", "logit_bias", "tools", "response_format", "user")
    assert (await chat(**dict.fromkeys(names))).status_code == 200


async def test_developer_is_the_newer_word_for_system_and_parts_are_joined(chat: Any, head: Any) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    await chat(messages=[{"role": "developer", "content": "be"}, {"role": "user", "content": parts}], add_generation_prompt=False)
    assert bytes(head.submitted[-1][0]).decode() == "system: be\nuser: one\ntwo\n"


async def test_unknown_fields_are_ignored_and_counted_and_harmless_ones_only_ignored(chat: Any, scrape: Any) -> None:
    assert (await chat(user="u", metadata={"a": "b"}, priority=1, wobble=1, wibble=[2])).status_code == 200
    assert (await scrape())['squall_unknown_fields_total{model="small"}'] == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"audio": {"voice": "x"}}, {"modalities": ["text", "audio"]}, {"web_search_options": {}}, {"reasoning_effort": "high"},
        {"verbosity": "low"}, {"guided_json": {}}, {"structured_outputs": {"regex": "a"}}, {"use_beam_search": True},
        {"chat_template": "{{ 1 }}"}, {"kv_transfer_params": {}}, {"continue_final_message": True}, {"allowed_token_ids": [1]},
    ],
)  # fmt: skip
async def test_what_would_change_the_output_and_is_not_supported_is_refused(chat: Any, fields: Any) -> None:
    answer = await chat(**fields)
    (name,) = fields
    assert answer.status_code == 400
    assert answer.json()["error"] | {"message": ""} == {
        "message": "", "type": "invalid_request_error", "param": name, "code": "unsupported_parameter",
    }  # fmt: skip


async def test_the_same_cache_key_is_the_same_session(chat: Any, head: Any) -> None:
    for key in ("a", "a", "b", None):
        await chat(prompt_cache_key=key)
    first, again, other, none = head.sessions
    assert first == again != other
    assert none == 0 < first < 1 << 63


async def test_best_of_returns_the_likeliest_choices(complete: Any, head: Any) -> None:
    fields: dict[str, Any] = {"seed": 3, "max_tokens": 6, "temperature": 2}
    several = (await complete(**fields, n=6, logprobs=0)).json()["choices"]
    ranked = sorted(several, key=lambda choice: sum(choice["logprobs"]["token_logprobs"]), reverse=True)
    answer = (await complete(**fields, n=2, best_of=6)).json()
    assert [choice["text"] for choice in answer["choices"]] == [choice["text"] for choice in ranked[:2]]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 36


async def test_a_body_over_the_limit_is_413_with_or_without_its_length(client: httpx.AsyncClient) -> None:
    async def pieces() -> Any:
        for _ in range(20):
            yield b" " * 100_000

    for content in (b" " * ((1 << 20) + 1), pieces()):
        answer = await client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (413, "the body is larger than 1048576 bytes")


def test_what_a_client_sent_is_shown_short() -> None:
    assert shown("x" * 1000) == "'" + "x" * 49 + "...'"
    sent: list[Any] = [None, True, {}, [1, 2], 10**5000]
    assert [shown(value) for value in sent] == [
        "null", "true", "an empty object", "an array of 2", "a number of more than 38 digits",
    ]  # fmt: skip


# -- whatever a client sends, it is not our mistake

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20)
values: st.SearchStrategy[Any] = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
KNOWN = (
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
    "stop", "n", "best_of", "echo", "logprobs", "top_logprobs", "logit_bias", "stream", "stream_options", "stop_token_ids",
    "min_tokens", "ignore_eos", "presence_penalty", "repetition_penalty", "response_format", "tools", "tool_choice",
    "prompt_cache_key", "chat_template_kwargs", "add_generation_prompt", "skip_special_tokens", "return_token_ids", "suffix",
    "tokens", "user",
)  # fmt: skip
bodies = st.dictionaries(st.sampled_from(KNOWN) | st.text(max_size=8), values, max_size=5)
roles = st.sampled_from(["user", "assistant", "system", "tool", "developer"])
messages = st.lists(
    st.fixed_dictionaries({"role": roles, "content": values}, optional={"name": values, "tool_calls": values}), max_size=3
)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(body=bodies, messages=st.none() | messages, valid=st.booleans())
async def test_no_field_makes_a_500(path: str, app: Any, body: dict[str, Any], messages: Any, valid: bool) -> None:
    base: dict[str, Any] = {"model": "small", "prompt": "hi", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
    body = {**(base if valid else {}), **body, **({"messages": messages} if messages is not None else {})}
    body.setdefault("max_tokens", 2)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://squall") as client:
        answer = await client.post(path, content=msgspec.json.encode(body), headers={"Content-Type": "application/json"})
    assert answer.status_code < 500, (body, answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert "\n" not in error["message"]
        assert len(error["message"]) < 2000


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(body=st.binary(max_size=200))
async def test_no_bytes_make_a_500(app: Any, body: bytes) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://squall") as client:
        answer = await client.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400
