"""Every error in OpenAI's shape, with the status, type, code and headers of one table."""

import logging
from typing import Any

import httpx
import pytest

from squall.core.events import Rejection
from squall.errors import Rejected, ReplicaFailed, RequestError
from squall.live.api.errors import ApiError, translate


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (RequestError("x", param="n"), 400, "invalid_request_error", "invalid_value"),
        (RequestError("x", code="model_not_found", status=404), 404, "invalid_request_error", "model_not_found"),
        (Rejected("x", reason="too_large", retry_after_s=None), 400, "invalid_request_error", "context_length_exceeded"),
        (Rejected("x", reason="queue_full", retry_after_s=2.0), 429, "rate_limit_error", "rate_limit_exceeded"),
        (Rejected("x", reason="draining", retry_after_s=2.0), 503, "service_unavailable", "draining"),
        (Rejected("x", reason="no_capacity", retry_after_s=None), 503, "service_unavailable", "no_capacity"),
        (Rejected("x", reason="lost", retry_after_s=None), 500, "server_error", "internal_error"),
        (ReplicaFailed("x"), 500, "server_error", "internal_error"),
    ],
)
def test_each_of_our_errors_has_its_row(error: Exception, status: int, kind: str, code: str) -> None:
    seen = translate(error)
    assert (seen.status, seen.type, seen.code, seen.message) == (status, kind, code, "x")


def test_every_reason_for_a_rejection_has_its_row() -> None:
    for reason in Rejection:
        seen = translate(Rejected("x", reason=reason.value, retry_after_s=1.0))
        assert (seen.status == 400) == (not reason.retryable)


def test_a_bug_is_named_as_one_and_not_explained() -> None:
    seen = translate(ZeroDivisionError("secret"))
    assert (seen.status, seen.code, "secret" in seen.message) == (500, "internal_error", False)


@pytest.mark.parametrize(
    ("retry_after_s", "seconds", "milliseconds"),
    [(0.0, b"1", b"1"), (0.25, b"1", b"250"), (7.2, b"8", b"7200"), (None, b"1", b"1000")],
)
def test_a_wait_is_told_in_whole_seconds_and_in_milliseconds(retry_after_s: float, seconds: bytes, milliseconds: bytes) -> None:
    headers = dict(ApiError(429, "t", "m", retry_after_s=retry_after_s).response_headers())
    assert (headers[b"retry-after"], headers[b"retry-after-ms"]) == (seconds, milliseconds)


async def test_a_bug_is_500_and_its_traceback_is_in_the_log_with_the_request_id(
    client: httpx.AsyncClient, head: Any, caplog: pytest.LogCaptureFixture
) -> None:
    head.failures = {0: ZeroDivisionError("a secret")}
    body = {"model": "small", "prompt": "hi"}
    with caplog.at_level(logging.ERROR, "squall"):
        answer = await client.post("/v1/completions", json=body, headers={"x-request-id": "mine-1"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "a secret" not in answer.text
    assert "request mine-1 failed" in caplog.text
    assert "ZeroDivisionError: a secret" in caplog.text


async def test_a_path_that_is_none_is_404_and_a_method_that_is_none_is_405(client: httpx.AsyncClient) -> None:
    missing = await client.get("/v2/nothing")
    assert (missing.status_code, missing.json()["error"]["message"]) == (404, "GET /v2/nothing: no such path")
    wrong = await client.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"] == {
        "message": "GET /v1/completions: this path takes POST",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }
    assert (await client.get("/health/")).status_code == 404


async def test_rejections_tell_when_to_come_back(chat: Any, head: Any) -> None:
    head.failures = {0: Rejected("shutting down", reason="draining", retry_after_s=4.0)}
    answer = await chat()
    assert (answer.status_code, answer.headers["retry-after"], answer.headers["retry-after-ms"]) == (503, "4", "4000")
    assert "x-should-retry" not in answer.headers
    head.failures = {0: Rejected("needs 900 blocks of 100", reason="too_large", retry_after_s=None)}
    answer = await chat()
    assert (answer.status_code, answer.headers["x-should-retry"], "retry-after" in answer.headers) == (400, "false", False)


@pytest.mark.parametrize(
    ("sent", "kept"), [("abc-1.2:3/4+5=6@7", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("é", False)]
)
async def test_a_request_id_is_echoed_where_it_is_harmless_and_replaced_where_not(
    client: httpx.AsyncClient, sent: str, kept: bool
) -> None:
    for path in ("/version", "/nothing"):
        answer = await client.get(path, headers=[(b"x-request-id", sent.encode())])
        assert (answer.headers["x-request-id"] == sent) == kept
        assert answer.headers["x-request-id"].isprintable()


async def test_every_answer_has_a_request_id_of_its_own(client: httpx.AsyncClient, chat: Any) -> None:
    ids = [(await chat(stream=stream)).headers["x-request-id"] for stream in (True, False)]
    assert len(set(ids)) == 2
