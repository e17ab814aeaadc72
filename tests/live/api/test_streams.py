"""Streams, event by event, and as the official client sees them."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from squall.errors import Rejected, ReplicaFailed

BODY: dict[str, Any] = {"model": "small", "stream": True, "max_tokens": 8}
CHAT: dict[str, Any] = {**BODY, "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {**BODY, "prompt": "hi"}


def chunks(data: list[str]) -> list[dict[str, Any]]:
    assert data[-1] == "[DONE]"
    return [json.loads(each) for each in data[:-1]]


async def test_a_chat_stream_is_role_then_content_then_finish_then_done(chat: Any, data: Any, head: Any) -> None:
    head.says = "hé!"
    answer = await chat(stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")
    seen = chunks(data(answer.text))
    assert [(chunk["choices"][0]["delta"], chunk["choices"][0]["finish_reason"]) for chunk in seen] == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "h"}, None),
        ({"content": ""}, None),  # the first byte of é is no character yet
        ({"content": "é"}, None),
        ({"content": "!"}, None),
        ({}, "stop"),
    ]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in seen}) == 1
    assert seen[0]["object"] == "chat.completion.chunk"
    assert all("usage" not in chunk for chunk in seen)


async def test_a_completion_stream_is_text_then_finish_then_done(complete: Any, data: Any, head: Any) -> None:
    head.says = "ok"
    seen = chunks(data((await complete(stream=True, echo=True)).text))
    assert [(chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) for chunk in seen] == [
        ("hi", None),
        ("o", None),
        ("k", None),
        ("", "stop"),
    ]
    assert {chunk["object"] for chunk in seen} == {"text_completion"}


async def test_the_last_text_of_a_stream_that_hits_its_limit_is_not_in_the_finish_chunk(
    complete: Any, data: Any, head: Any
) -> None:
    head.says = "abc"
    seen = chunks(data((await complete(stream=True, max_tokens=2)).text))
    assert [(chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) for chunk in seen] == [
        ("a", None),
        ("b", None),
        ("", "length"),
    ]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_obfuscation": True}])
async def test_no_usage_is_sent_unless_it_was_asked_for(chat: Any, data: Any, options: Any) -> None:
    assert all(
        "usage" not in chunk and chunk["choices"]
        for chunk in chunks(data((await chat(stream=True, stream_options=options)).text))
    )


async def test_usage_comes_once_in_a_last_chunk_without_choices(chat: Any, complete: Any, data: Any) -> None:
    for post in (chat, complete):
        *before, last = chunks(data((await post(stream=True, n=2, stream_options={"include_usage": True})).text))
        assert all(chunk["usage"] is None and chunk["choices"] for chunk in before)
        assert last["choices"] == []
        assert last["usage"] == (await post(n=2)).json()["usage"]


async def test_stream_options_need_a_stream(chat: Any) -> None:
    bad: list[dict[str, Any]] = [{"stream_options": {}}, {"stream": True, "stream_options": 7}]
    for fields in bad:
        assert (await chat(**fields)).json()["error"]["param"] == "stream_options"
    answer = await chat(stream=True, stream_options={"include_usage": "yes"})
    assert answer.json()["error"]["param"] == "stream_options.include_usage"


async def test_each_choice_of_a_stream_has_one_opening_and_one_finish_and_the_text_it_has_unstreamed(
    chat: Any, data: Any
) -> None:
    seen = chunks(data((await chat(stream=True, n=3, seed=5)).text))
    whole = (await chat(n=3, seed=5)).json()["choices"]
    for index in range(3):
        mine = [chunk["choices"][0] for chunk in seen if chunk["choices"][0]["index"] == index]
        assert [choice["delta"].get("role") for choice in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == whole[index]["message"]["content"]
    order = [chunk["choices"][0]["index"] for chunk in seen]
    assert order != sorted(order)  # choices come interleaved, not one after the other


async def test_streamed_logprobs_and_token_ids_are_those_of_the_whole_answer(chat: Any, complete: Any, data: Any) -> None:
    fields: dict[str, Any] = {"seed": 5, "return_token_ids": True}
    streamed = chunks(data((await complete(stream=True, logprobs=2, **fields)).text))
    whole = (await complete(logprobs=2, **fields)).json()["choices"][0]
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for chunk in streamed[:-1] for each in chunk["choices"][0]["logprobs"][key]] == whole["logprobs"][key]
    assert [token for chunk in streamed[:-1] for token in chunk["choices"][0]["token_ids"]] == whole["token_ids"]
    streamed = chunks(data((await chat(stream=True, logprobs=True, top_logprobs=1, **fields)).text))
    items = [item for chunk in streamed if chunk["choices"][0]["logprobs"] for item in chunk["choices"][0]["logprobs"]["content"]]
    assert items == (await chat(logprobs=True, top_logprobs=1, **fields)).json()["choices"][0]["logprobs"]["content"]


async def test_an_echo_alone_is_a_stream_too(complete: Any, data: Any) -> None:
    seen = chunks(data((await complete(stream=True, echo=True, max_tokens=0, prompt=["a", "b"])).text))
    assert [(chunk["choices"][0]["index"], chunk["choices"][0]["text"]) for chunk in seen] == [
        (0, "a"),
        (0, ""),
        (1, "b"),
        (1, ""),
    ]


async def test_an_error_before_the_first_token_is_a_plain_http_error(chat: Any, head: Any) -> None:
    head.failures = {0: Rejected("the queue is full", reason="queue_full", retry_after_s=2.5)}
    for stream in (True, False):
        answer = await chat(stream=stream)
        assert (answer.status_code, answer.headers["content-type"]) == (429, "application/json")
        assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("3", "2500")
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"


async def test_headers_wait_for_the_first_token(head: Any, address: str, until: Any) -> None:
    head.gate = asyncio.Event()
    async with httpx.AsyncClient(base_url=address) as client:
        sent = asyncio.create_task(client.send(client.build_request("POST", "/v1/chat/completions", json=CHAT), stream=True))
        await until(lambda: bool(head.active))
        await asyncio.sleep(0.05)
        assert not sent.done()
        head.gate.set()
        answer = await sent
        assert answer.status_code == 200
        await answer.aclose()


async def test_an_error_in_the_middle_is_an_event_and_never_looks_like_success(
    chat: Any, complete: Any, data: Any, head: Any
) -> None:
    head.failures = {3: ReplicaFailed("replica 0 died and the request could not be continued")}
    for post in (chat, complete):
        answer = await post(stream=True)
        *_, error, done = data(answer.text)
        assert (answer.status_code, done) == (200, "[DONE]")
        assert json.loads(error)["error"] == {
            "message": "replica 0 died and the request could not be continued",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
        assert '"finish_reason":"' not in answer.text
        assert (await post()).status_code == 500


async def test_when_one_choice_fails_the_others_are_cancelled(chat: Any, head: Any) -> None:
    head.failures = {2: ReplicaFailed("gone")}
    assert (await chat(n=4)).status_code == 500
    assert not head.active
    assert sum(stream.cancelled for stream in head.streams) >= 3


# -- the official client


@pytest.fixture
async def sdk(address: str) -> Any:
    async with openai.AsyncOpenAI(base_url=f"{address}/v1/", api_key="any", max_retries=0) as client:
        yield client


async def test_the_official_client_reads_a_chat_stream(sdk: Any, head: Any) -> None:
    head.says = "grüße, welt"
    stream = await sdk.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
    )
    seen = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in seen if chunk.choices) == "grüße, welt"
    assert [chunk.choices[0].finish_reason for chunk in seen if chunk.choices][-1] == "stop"
    assert seen[-1].choices == []
    assert seen[-1].usage.completion_tokens == 14


async def test_the_official_client_reads_whole_answers(sdk: Any, head: Any) -> None:
    chat = await sdk.chat.completions.create(
        model="small", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=9, n=2
    )
    assert [len(choice.message.content) for choice in chat.choices] == [9, 9]
    text = await sdk.completions.create(model="small", prompt=["a", "b"], max_tokens=3, logprobs=1, best_of=2)
    assert [choice.index for choice in text.choices] == [0, 1]
    assert text.choices[0].logprobs.tokens
    assert [model.id async for model in sdk.models.list()] == ["small", "small/alias"]
    assert (await sdk.models.retrieve("small")).owned_by == "squall"


async def test_the_official_client_accumulates_a_stream_into_a_message(sdk: Any, head: Any) -> None:
    head.says = "in pieces"
    async with sdk.chat.completions.stream(model="small", messages=[{"role": "user", "content": "hi"}]) as stream:
        final = await stream.get_final_completion()
    assert (final.choices[0].message.content, final.choices[0].finish_reason) == ("in pieces", "stop")


async def test_the_official_client_raises_on_an_error_in_the_middle(sdk: Any, head: Any) -> None:
    head.failures = {3: ReplicaFailed("replica 0 died")}
    stream = await sdk.completions.create(model="small", prompt="hi", stream=True)
    with pytest.raises(openai.APIError, match="replica 0 died"):
        async for _ in stream:
            pass


async def test_the_official_client_raises_the_error_that_belongs_to_the_status(sdk: Any, head: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await sdk.completions.create(model="other", prompt="hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as hot:
        await sdk.completions.create(model="small", prompt="hi", temperature=3)
    assert hot.value.param == "temperature"
    assert "temperature: expected a number between 0 and 2, got 3" in hot.value.message
    head.failures = {0: Rejected("full", reason="queue_full", retry_after_s=1)}
    with pytest.raises(openai.RateLimitError):
        await sdk.completions.create(model="small", prompt="hi")
    head.failures = {0: ReplicaFailed("gone")}
    with pytest.raises(openai.InternalServerError):
        await sdk.completions.create(model="small", prompt="hi")


async def test_the_official_client_retries_what_may_succeed_and_only_that(head: Any, address: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="any", max_retries=2) as sdk:
        for failure, attempts in (
            (Rejected("full", reason="queue_full", retry_after_s=0.001), 3),
            (Rejected("its replicas died", reason="lost", retry_after_s=None), 1),
            (Rejected("too large for any KV pool", reason="too_large", retry_after_s=None), 1),
        ):
            head.failures, before = {0: failure}, len(head.submitted)
            with pytest.raises(openai.APIStatusError):
                await sdk.completions.create(model="small", prompt="hi")
            assert len(head.submitted) - before == attempts


async def test_the_blocking_client_works_as_well(head: Any, address: str) -> None:
    head.says = "sync"

    def ask() -> str:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="any") as sdk:
            stream = sdk.chat.completions.create(model="small", messages=[{"role": "user", "content": "hi"}], stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(ask) == "sync"
