"""What goes wrong, in the words of HTTP: the one place where squall's errors become a status, a type and a code.

Knows the OpenAI error object and the retry headers. Does not know which request it was, nor whether a stream had begun.
"""

from __future__ import annotations

import math

import msgspec
from msgspec import Struct

from squall.core.events import Rejection
from squall.errors import Rejected, ReplicaFailed, RequestError

RETRY_AFTER_S = 1.0
"""What a 429 or 503 suggests when nothing better is known."""

CLIENT_CLOSED = 499
"""Never sent: the status under which a request is counted whose client went away."""

_REJECTED: dict[str, tuple[int, str, str]] = {
    Rejection.TOO_LARGE.value: (400, "invalid_request_error", "context_length_exceeded"),
    Rejection.QUEUE_FULL.value: (429, "rate_limit_error", "rate_limit_exceeded"),
    Rejection.DRAINING.value: (503, "service_unavailable", "draining"),
    Rejection.NO_CAPACITY.value: (503, "service_unavailable", "no_capacity"),
    Rejection.LOST.value: (500, "server_error", "internal_error"),
}


class ApiError(Struct, frozen=True):
    """An error as a client sees it.

    Attributes:
        retry_after_s: when a retry makes sense; None where no time is known.
        deterministic: the same request will fail again, so clients are asked not to retry.
        headers: further response headers.
    """

    status: int
    type: str
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None
    deterministic: bool = False
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def body(self) -> bytes:
        """The OpenAI error object, as JSON on one line."""
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": fields})

    def response_headers(self) -> list[tuple[bytes, bytes]]:
        """`headers`, and what tells clients whether and when to retry."""
        headers = list(self.headers)
        if self.status in (429, 503):
            wait_s = max(self.retry_after_s if self.retry_after_s is not None else RETRY_AFTER_S, 0.001)
            headers.append((b"retry-after", str(max(1, math.ceil(wait_s))).encode()))
            headers.append((b"retry-after-ms", str(math.ceil(wait_s * 1000)).encode()))
        if self.deterministic:
            headers.append((b"x-should-retry", b"false"))
        return headers


class Refusal(Exception):
    """A request that ends with `error` before anything looked at what it asks for: wrong key, method, size or content type."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


class ClientGone(Exception):
    """The client closed its connection; nobody will read an answer."""


def invalid(
    message: str, *, status: int = 400, code: str | None = None, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> Refusal:
    """A refusal of type `invalid_request_error`."""
    return Refusal(ApiError(status, "invalid_request_error", message, code, deterministic=True, headers=headers))


def translate(error: Exception) -> ApiError:
    """What `error` is to a client. Anything that is not squall's own is a bug: it is not explained, only named as one."""
    match error:
        case Refusal():
            return error.error
        case RequestError():
            return ApiError(error.status, "invalid_request_error", str(error), error.code, error.param, deterministic=True)
        case Rejected():
            status, kind, code = _REJECTED.get(error.reason, (503, "service_unavailable", "no_capacity"))
            return ApiError(
                status, kind, str(error), code, retry_after_s=error.retry_after_s, deterministic=error.retry_after_s is None
            )
        case ReplicaFailed():
            return ApiError(500, "server_error", str(error), "internal_error")
        case _:
            return ApiError(
                500, "server_error", "squall made a mistake; its log has the details under this x-request-id", "internal_error"
            )


def is_bug(error: Exception) -> bool:
    """Whether `error` deserves a traceback in the log."""
    return not isinstance(error, Refusal | RequestError | Rejected | ReplicaFailed)
