"""What public test suites expect of an OpenAI-compatible server, one test for each behaviour that applies."""

import asyncio
from typing import Any

import httpx
import pytest

import squall
from squall.config import Config, Serve
from squall.live.api.app import create_app


async def test_health_is_200_when_ready_and_503_once_no_replica_is_left(client: httpx.AsyncClient, head: Any) -> None:
    ready = await client.get("/health")
    assert (ready.status_code, ready.content) == (200, b"")
    head.ready = False
    assert (await client.get("/health")).status_code == 503


async def test_version_is_the_exact_version(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": squall.__version__}


async def test_models_lists_the_served_name_and_its_aliases(client: httpx.AsyncClient, chat: Any) -> None:
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["small", "small/alias"]
    assert listed["data"][0]["created"] == 1_700_000_000
    one = (await client.get("/v1/models/small/alias")).json()
    assert (one["id"], one["object"], one["owned_by"]) == ("small/alias", "model", "squall")
    assert (await chat(model="small/alias")).json()["model"] == "small/alias"
    assert (await client.get("/v1/models/other")).json()["error"]["code"] == "model_not_found"


async def test_health_and_models_are_open_and_the_rest_answers_401_without_a_key(head: Any) -> None:
    app = create_app(head, Config(serve=Serve(api_keys=("secret", "other"))))
    body = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://squall") as client:
        for path in ("/health", "/v1/models", "/v1/models/small", "/metrics", "/livez", "/readyz"):
            assert (await client.get(path)).status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"X-Api-Key": "wrong"}, {"Authorization": "Basic secret"}):
            answer = await client.post("/v1/chat/completions", json=body, headers=headers)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert answer.json()["error"] == {
                "message": "wrong or missing API key; send it as 'Authorization: Bearer KEY'",
                "type": "invalid_request_error",
                "param": None,
                "code": "invalid_api_key",
            }
        for headers in ({"Authorization": "Bearer secret"}, {"Authorization": "bearer other"}, {"X-Api-Key": "secret"}):
            assert (await client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
        assert (await client.get("/nowhere")).status_code == 401


async def test_a_cors_preflight_echoes_an_origin_that_is_configured_and_no_other(head: Any) -> None:
    ask = {
        "Origin": "https://page.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    for origins, status, allowed in (
        (("https://page.example",), 200, "https://page.example"),
        (("*",), 200, "https://page.example"),
        (("https://other.example",), 400, None),
        ((), 405, None),
    ):
        app = create_app(head, Config(serve=Serve(cors_origins=origins)))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://squall") as client:
            answer = await client.options("/v1/chat/completions", headers=ask)
            assert (answer.status_code, answer.headers.get("access-control-allow-origin")) == (status, allowed)
            if allowed:
                assert answer.headers["access-control-allow-credentials"] == "true"
                assert "POST" in answer.headers["access-control-allow-methods"]
                assert "authorization" in answer.headers["access-control-allow-headers"].lower()


async def test_a_wrong_content_type_is_415(client: httpx.AsyncClient) -> None:
    for media in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = await client.post("/v1/chat/completions", content=b"{}", headers={"Content-Type": media})
        assert (answer.status_code, answer.json()["error"]["type"]) == (415, "invalid_request_error")


@pytest.mark.parametrize(
    "body", [b'"text"', b"[1, 2]", b"7", b"null", b"", b"{", b"{'a': 1}", b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000]
)
async def test_a_body_that_is_no_json_object_is_400(client: httpx.AsyncClient, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        answer = await client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("hello", "messages"),
        ([], "messages"),
        ([1, 2], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"role": 7, "content": "x"}], "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, {"role": "assistant", "content": "z"}],
            "messages",
        ),
    ],
)
async def test_messages_that_are_none_get_an_error_that_names_the_place(chat: Any, messages: Any, param: str) -> None:
    answer = await chat(messages=messages)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "prompt", ["", None, [], [""], ["x", ""], [[]], [[65], []], 7, {"a": 1}, [65, "x"], ["x", [65]], [True], [[True]]]
)
async def test_an_empty_or_impossible_prompt_is_400(complete: Any, prompt: Any) -> None:
    answer = await complete(prompt=prompt)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("token", [258, -1, 10**30])
async def test_a_token_id_outside_the_vocabulary_is_400_and_named(complete: Any, token: int) -> None:
    answer = await complete(prompt=[65, token])
    assert answer.status_code == 400
    assert "outside the vocabulary of 258 tokens" in answer.json()["error"]["message"]


async def test_a_request_longer_than_the_context_is_400_and_names_both_numbers(complete: Any, chat: Any) -> None:
    for prompt, max_tokens, numbers in (
        ([65] * 600, 1, ("600", "512")),
        ([65] * 512, 1, ("512", "512")),
        ([65] * 500, 13, ("500", "13", "512", "at most 12")),
    ):
        error = (await complete(prompt=prompt, max_tokens=max_tokens)).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert all(number in error["message"] for number in numbers)
    assert (await complete(prompt=[65] * 500, max_tokens=12)).status_code == 200
    assert (await chat(messages=[{"role": "user", "content": "x" * 600}])).json()["error"]["code"] == "context_length_exceeded"
    assert (await chat(max_tokens=500)).json()["error"]["param"] == "max_tokens"


async def test_logit_bias_takes_the_last_id_and_names_all_offenders(chat: Any, head: Any) -> None:
    assert (await chat(logit_bias={"257": -100, "65": 3.5})).status_code == 200
    assert head.submitted[-1][1].logit_bias == {257: -100.0, 65: 3.5}
    outside = (await chat(logit_bias={"258": 1})).json()["error"]["message"]
    assert outside == "logit_bias: token id 258 is outside the vocabulary of 258 tokens"
    several = (await chat(logit_bias={"x": 1, "66": "high", "67": 101, "65": 1})).json()["error"]["message"]
    assert all(part in several for part in ("'x' is no token id", "the bias of 66 is 'high'", "the bias of 67 is 101"))


async def test_a_bias_changes_what_is_said(complete: Any) -> None:
    answer = await complete(logit_bias={str(ord("#")): 100}, max_tokens=5)
    assert answer.json()["choices"][0]["text"] == "#####"


@pytest.mark.parametrize(
    ("prompt", "count"), [("hi", 1), (["hi", "ho"], 2), ([104, 105], 1), ([[104, 105], [104, 111], [104]], 3)]
)
async def test_prompts_may_be_texts_or_tokens_alone_or_in_lists(complete: Any, prompt: Any, count: int) -> None:
    answer = (await complete(prompt=prompt, n=3)).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(3 * count))


async def test_choices_of_a_list_of_prompts_belong_to_their_prompt(complete: Any, head: Any) -> None:
    answer = (await complete(prompt=["one", "two"], n=2, echo=True)).json()
    assert [choice["text"][:3] for choice in answer["choices"]] == ["one", "one", "two", "two"]


async def test_usage_counts_exactly_what_the_tokenizer_counts(complete: Any, chat: Any, head: Any) -> None:
    one = (await complete(prompt="hällo", max_tokens=5)).json()["usage"]
    assert (one["prompt_tokens"], one["completion_tokens"], one["total_tokens"]) == (7, 5, 12)
    several = (await complete(prompt=["hi", "hello"], n=2, max_tokens=5)).json()["usage"]
    assert (several["prompt_tokens"], several["completion_tokens"]) == (3 + 6, 4 * 5)
    rendered = head.tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert (await chat()).json()["usage"]["prompt_tokens"] == len(rendered.encode())


async def test_answers_have_id_created_model_and_object(chat: Any, complete: Any) -> None:
    for post, prefix, kind in ((chat, "chatcmpl-", "chat.completion"), (complete, "cmpl-", "text_completion")):
        answer = (await post()).json()
        assert answer["id"].startswith(prefix)
        assert (answer["object"], answer["model"], type(answer["created"])) == (kind, "small", int)
    message = (await chat()).json()["choices"][0]
    assert {"index", "message", "logprobs", "finish_reason"} <= message.keys()
    assert message["message"].keys() == {"role", "content", "refusal"}


async def test_finish_reason_tells_length_from_stop_and_which_stop(complete: Any, head: Any) -> None:
    head.says = "one two three"
    for fields, expected in (
        ({"max_tokens": 5}, ("one t", "length", None)),
        ({"max_tokens": 50}, ("one two three", "stop", None)),
        ({"max_tokens": 50, "stop": "two"}, ("one ", "stop", "two")),
        ({"max_tokens": 50, "stop": ["xyz", " th"]}, ("one two", "stop", " th")),
        ({"max_tokens": 50, "stop_token_ids": [ord("t")]}, ("one ", "stop", ord("t"))),
    ):
        choice = (await complete(**fields)).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": 7}, "stop"),
        ({"stop": [7]}, "stop"),
        ({"stop_token_ids": 7}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop_token_ids": [258]}, "stop_token_ids"),
        ({"stop_regex": "a+"}, "stop_regex"),
    ],
)
async def test_stops_are_checked(complete: Any, fields: Any, param: str) -> None:
    answer = await complete(**fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_ignore_eos_generates_exactly_max_tokens_and_min_tokens_is_honoured(complete: Any, head: Any) -> None:
    head.says = "ab"
    for fields, count, reason in (({}, 3, "stop"), ({"ignore_eos": True}, 30, "length"), ({"min_tokens": 10}, 30, "length")):
        answer = (await complete(max_tokens=30, **fields)).json()
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (count, reason)


async def test_chat_logprobs_are_items_that_join_to_the_text(chat: Any, head: Any) -> None:
    head.says = "héé"
    choice = (await chat(logprobs=True, top_logprobs=3)).json()["choices"][0]
    items = choice["logprobs"]["content"][:-1]  # the last one ends the text
    assert b"".join(bytes(item["bytes"]) for item in items).decode() == choice["message"]["content"] == "héé"
    assert all(len(item["top_logprobs"]) == 3 for item in items)
    assert all(each["logprob"] <= 0 for item in items for each in (item, *item["top_logprobs"]))
    assert (await chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert (await chat()).json()["choices"][0]["logprobs"] is None
    assert (await chat(top_logprobs=3)).json()["error"]["param"] == "top_logprobs"


async def test_completion_logprobs_are_parallel_arrays_with_offsets(complete: Any, head: Any) -> None:
    head.says = "aéb"
    choice = (await complete(logprobs=2, max_tokens=4)).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert logprobs["text_offset"] == [0, 1, 2, 2]
    assert all(value <= 0 for value in logprobs["token_logprobs"])
    assert all(len(top) in (2, 3) for top in logprobs["top_logprobs"])
    assert all(token in top for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))


async def test_a_logprob_of_minus_infinity_is_a_number(chat: Any, head: Any) -> None:
    head.says = "a"
    answer = await chat(logprobs=True, max_tokens=2, logit_bias={str(ord("#")): 100})
    assert all(item["logprob"] >= -9999.0 for item in answer.json()["choices"][0]["logprobs"]["content"])


async def test_echo_puts_the_prompt_first(complete: Any, head: Any) -> None:
    head.says = "ho"
    assert (await complete(echo=True)).json()["choices"][0]["text"] == "hiho"
    assert (await complete(prompt=[104, 105], echo=True)).json()["choices"][0]["text"] == "hiho"
    before = len(head.submitted)
    alone = (await complete(echo=True, max_tokens=0)).json()
    assert (alone["choices"][0]["text"], alone["choices"][0]["finish_reason"]) == ("hi", "length")
    assert (alone["usage"]["completion_tokens"], len(head.submitted)) == (0, before)
    assert (await complete(max_tokens=0)).json()["error"]["param"] == "max_tokens"
    assert (await complete(echo=True, logprobs=1)).json()["error"]["param"] == "logprobs"


async def test_the_same_seed_says_the_same_and_choices_differ(chat: Any) -> None:
    async def say(**fields: Any) -> list[str]:
        return [choice["message"]["content"] for choice in (await chat(max_tokens=20, **fields)).json()["choices"]]

    assert await say(seed=7) == await say(seed=7) != await say(seed=8)
    assert await say(seed=-7) == await say(seed=-7)
    three = await say(seed=7, n=3)
    assert len(set(three)) == 3
    assert three == await say(seed=7, n=3)
    assert three[:1] == await say(seed=7)
    assert await say(temperature=0) == await say(temperature=0)
    assert len(set(await say(temperature=0, n=3))) == 1
    assert await say() != await say()


@pytest.mark.parametrize(
    "format", [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}, {"type": "wat"}, "json", {}]
)
async def test_a_response_format_that_would_change_the_output_is_refused_by_name(chat: Any, format: Any) -> None:
    answer = await chat(response_format=format)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
    assert (await chat(response_format={"type": "text"})).status_code == 200


async def test_tools_are_refused_by_name_and_not_dropped(chat: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for fields, param in (
        ({"tools": [tool]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ):
        answer = await chat(**fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert answer.json()["error"]["code"] == "unsupported_parameter"
    assert (await chat(tools=[], tool_choice="none", parallel_tool_calls=True)).status_code == 200


async def test_many_clients_that_give_up_leave_nothing_behind(head: Any, address: str, until: Any) -> None:
    head.step_s = 0.01
    body = {"model": "small", "prompt": "long", "max_tokens": 400, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=address, limits=httpx.Limits(max_connections=None)) as client:
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=body, timeout=0.5) for _ in range(50)), return_exceptions=True
        )
        assert all(isinstance(answer, httpx.TimeoutException) for answer in answers)
        await until(lambda: not head.active)
        short = await client.post("/v1/completions", json={**body, "max_tokens": 2}, timeout=5)
        assert short.status_code == 200


async def test_load_is_0_then_1_during_a_request_then_0(client: httpx.AsyncClient, chat: Any, head: Any, until: Any) -> None:
    async def load() -> int:
        return int((await client.get("/load")).json()["server_load"])

    head.gate = asyncio.Event()
    assert await load() == 0
    running = asyncio.create_task(chat())
    await until(lambda: bool(head.active))
    assert await load() == 1
    head.gate.set()
    await running
    assert await load() == 0


async def test_tokenize_and_detokenize_are_inverse(client: httpx.AsyncClient) -> None:
    made = (await client.post("/tokenize", json={"model": "small", "prompt": "hé", "add_special_tokens": False})).json()
    assert made == {"count": 3, "max_model_len": 512, "tokens": [104, 0xC3, 0xA9]}
    assert (await client.post("/detokenize", json={"tokens": made["tokens"]})).json() == {"prompt": "hé"}
    special = (await client.post("/tokenize", json={"prompt": "h"})).json()
    assert special["tokens"] == [256, 104]
    chat = (
        await client.post("/tokenize", json={"messages": [{"role": "user", "content": "h"}], "add_generation_prompt": False})
    ).json()
    assert bytes(chat["tokens"]) == b"user: h\n"
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
    ):
        assert (await client.post(path, json=body)).json()["error"]["param"] == param


async def test_draining_closes_readyz_and_the_list_of_models_but_not_livez(client: httpx.AsyncClient, head: Any) -> None:
    async def codes() -> list[int]:
        return [(await client.get(path)).status_code for path in ("/livez", "/readyz", "/health", "/ping")]

    assert await codes() == [200, 200, 200, 200]
    head.draining = True
    assert await codes() == [200, 503, 200, 200]
    head.draining, head.ready = False, False
    assert await codes() == [200, 503, 503, 503]


async def test_a_model_is_listed_only_while_a_request_would_reach_it(client: httpx.AsyncClient, head: Any) -> None:
    head.ready = False
    assert (await client.get("/v1/models")).json()["data"] == []
    one = await client.get("/v1/models/small")
    assert (one.status_code, one.json()["error"]["code"]) == (503, "no_capacity")
    assert int(one.headers["retry-after"]) >= 1
