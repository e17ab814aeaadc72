"""The administrator's side."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from squall.config import Config, Serve
from squall.live.api.app import create_app
from tests.live.in_process import in_process


async def test_the_status_says_what_there_is_and_why(client: httpx.AsyncClient) -> None:
    status = (await client.get("/fleet")).json()
    assert status["roles"] == [
        {
            "role": "both",
            "minimum": 1,
            "maximum": 8,
            "target": 1,
            "manual": None,
            "ready": 1,
            "coming": 0,
            "draining": 0,
            "idle": 0,
        }
    ]
    assert status["replicas"][0] | {"requests": 0} == {
        "replica": 0, "role": "both", "phase": "ready", "layers": 30, "load": "disk", "source": "ssd 0", "requests": 0,
    }  # fmt: skip
    assert status["decisions"] == [{"at": 1_700_000_000.5, "role": "both", "before": 1, "after": 2, "why": "asked for"}]


async def test_somebody_wants_a_number_and_gives_the_decision_back(client: httpx.AsyncClient, head: Any) -> None:
    answer = await client.post("/fleet/scale", json={"replicas": 3})
    assert (answer.status_code, head.wanted, answer.json()["roles"][0]["manual"]) == (200, 3, 3)
    assert (await client.post("/fleet/scale", json={"replicas": None, "role": "both"})).status_code == 200
    assert head.wanted is None


async def test_whoever_changes_the_number_is_told_the_new_one(tmp_path: Path) -> None:
    """By a real head, which decides an instant later."""
    settings = ("serve.engine=emulated", "model.name=llama-3.1-8b", "cluster.gpu=h100-sxm", "fleet.replicas={min=1, max=2}")
    async with in_process(tmp_path / "log", *settings) as (real, _):
        app = create_app(real, Config())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://squall") as client:
            for asked, target in ((2, 2), (1, 1), (7, 2)):
                role = (await client.post("/fleet/scale", json={"replicas": asked})).json()["roles"][0]
                assert (role["manual"], role["target"]) == (asked, target)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ({"replicas": "three"}, "replicas: expected a number from 0 to 100000, or null, got 'three'"),
        ({"replicas": True}, "replicas: expected a number"),
        ({"replicas": -1}, "replicas: expected a number"),
        ({"replicas": 2, "role": "decode"}, "role: expected 'both', the only role of this fleet, or none, got 'decode'"),
    ],
)
async def test_nonsense_changes_nothing(client: httpx.AsyncClient, head: Any, body: Any, complaint: str) -> None:
    answer = await client.post("/fleet/scale", json=body)
    assert answer.status_code == 400
    assert complaint in answer.json()["error"]["message"]
    assert head.wanted is None


async def test_only_who_has_a_key_may_ask(head: Any) -> None:
    app = create_app(head, Config(serve=Serve(api_keys=("secret",))))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://squall") as client:
        assert (await client.get("/fleet")).status_code == 401
        assert (await client.post("/fleet/scale", json={"replicas": 3})).status_code == 401
        assert head.wanted is None
        assert (await client.get("/fleet", headers={"x-api-key": "secret"})).status_code == 200
