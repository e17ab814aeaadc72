"""What `squall scale` says to a service, and what it makes of the answers."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from squall.cli import app
from squall.errors import ConfigError
from squall.live.admin import fleet_of, lines_of

STATUS = {
    "roles": [
        {"role": "both", "minimum": 1, "maximum": 4, "target": 3, "manual": 3, "ready": 1, "coming": 2, "draining": 0, "idle": 0}
    ],
    "replicas": [
        {"replica": 0, "role": "both", "phase": "ready", "layers": 8, "load": None, "source": None, "requests": 5},
        {"replica": 1, "role": "both", "phase": "loading", "layers": 2, "load": "p2p", "source": "gpu 0", "requests": 0},
    ],
    "decisions": [{"at": 1.0, "role": "both", "before": 1, "after": 3, "why": "asked for"}],
}
LINES = [
    "both: 3 wanted (3 asked for), 1 ready, 2 coming, within 1 to 4",
    "  replica 0: ready, 8 layers, 5 requests",
    "  replica 1: loading, 2 layers, p2p from gpu 0, 0 requests",
    "  1 -> 3 both: asked for",
]


class Service:
    """Answers every request with the same, and remembers what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str | None, Any]] = []
        self.code = 200
        self.body = json.dumps(STATUS).encode()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                sent = json.loads(self.rfile.read(length)) if length else None
                service.asked.append((self.command, self.path, self.headers.get("authorization"), sent))
                self.send_response(service.code)
                self.end_headers()
                self.wfile.write(service.body)

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                """Not on the test's output."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def test_a_question_and_a_change(service: Service) -> None:
    assert fleet_of(service.url + "/", None) == STATUS
    assert fleet_of(service.url, "k", {"role": "both", "replicas": 3}) == STATUS
    assert service.asked == [
        ("GET", "/fleet", None, None),
        ("POST", "/fleet/scale", "Bearer k", {"role": "both", "replicas": 3}),
    ]


def test_the_status_in_lines() -> None:
    assert lines_of(STATUS) == LINES


def test_several_models_one_after_the_other_with_their_gpus() -> None:
    chat = {"model": "chat", **STATUS, "gpus": {"held": 3, "awaited": 2}}
    code = {"model": "code", **STATUS, "gpus": {"held": 1, "awaited": 0}}
    assert lines_of({"models": [chat, code]}) == [
        "chat:", LINES[0], "  has 3 GPUs, and waits for 2 more, which other models have", *LINES[1:],
        "code:", LINES[0], "  has 1 GPU", *LINES[1:],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "said"), [(b'{"error": {"message": "at most 4"}}', "at most 4"), (b"<html>", "Bad Request"), (b"[]", "Bad Request")]
)
def test_a_refusal_in_the_words_of_the_service(service: Service, body: bytes, said: str) -> None:
    service.code, service.body = 400, body
    with pytest.raises(ConfigError, match=f"{service.url}: {said}"):
        fleet_of(service.url, None)


def test_who_lacks_the_key_hears_how_to_give_it(service: Service) -> None:
    service.code, service.body = 401, b'{"error": {"message": "missing API key"}}'
    with pytest.raises(ConfigError, match=f"{service.url}: missing API key; give it with --api-key, or in OPENAI_API_KEY"):
        fleet_of(service.url, None)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "no address"])
def test_nobody_there(url: str) -> None:
    with pytest.raises(ConfigError, match=f"{url}: no service answers there"):
        fleet_of(url, None)


def test_what_is_no_status(service: Service) -> None:
    service.body = b"hello"
    with pytest.raises(ConfigError, match="no service answers there"):
        fleet_of(service.url, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["3", "--auto"], "a number of replicas and --auto contradict each other; give one of them"),
        (["--role", "decode"], "--role alone changes nothing; give a number of replicas, or --auto"),
        (["--model", "chat"], "--model alone changes nothing; give a number of replicas, or --auto"),
    ],
)
def test_words_that_make_no_sense_together_are_refused(service: Service, words: list[str], message: str) -> None:
    run = CliRunner().invoke(app, ["scale", *words, "--url", service.url])
    assert isinstance(run.exception, ConfigError)
    assert str(run.exception) == message
    assert service.asked == []


def test_the_command(service: Service) -> None:
    run = CliRunner().invoke(app, ["scale", "3", "--url", service.url])
    assert (run.exit_code, run.stdout.splitlines()) == (0, LINES)
    assert [(method, path) for method, path, _, _ in service.asked] == [("POST", "/fleet/scale")]
