"""What an administrator's command says to a running service, over its HTTP endpoint. Knows no head."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import Any

from squall.errors import ConfigError
from squall.quantities import counted

PATIENCE_S = 10.0


def fleet_of(url: str, api_key: str | None, change: dict[str, Any] | None = None) -> dict[str, Any]:
    """The fleet's status, after the change if there is one. See `/fleet` and `/fleet/scale` in docs/api.md.

    Raises ConfigError: nobody answers there, or the service refuses.
    """
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
    path, data = ("/fleet", None) if change is None else ("/fleet/scale", json.dumps(change).encode())
    try:
        request = urllib.request.Request(url.rstrip("/") + path, data, headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            status: dict[str, Any] = json.load(answer)
            return status
    except urllib.error.HTTPError as error:
        with error:
            hint = "; give it with --api-key, or in OPENAI_API_KEY" if error.code == HTTPStatus.UNAUTHORIZED else ""
            raise ConfigError(f"{url}: {_message(error.read()) or error.reason}{hint}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{url}: no service answers there ({getattr(error, 'reason', error)})") from None


def _message(body: bytes) -> str | None:
    try:
        message: str = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return None
    return message


def lines_of(status: dict[str, Any]) -> list[str]:
    """The status for a terminal; of several models one after the other."""
    if "models" in status:
        return [line for fleet in status["models"] for line in (f"{fleet['model']}:", *lines_of(fleet))]
    roles = [
        f"{role['role']}: {role['target']} wanted"
        + (f" ({role['manual']} asked for)" if role["manual"] is not None else "")
        + f", {role['ready']} ready, {role['coming']} coming, within {role['minimum']} to {role['maximum']}"
        for role in status["roles"]
    ]
    if gpus := status.get("gpus"):
        waits = f", and waits for {gpus['awaited']} more, which other models have" if gpus["awaited"] else ""
        roles.append(f"  has {counted(gpus['held'], 'GPU')}{waits}")
    replicas = [
        f"  replica {replica['replica']}: {replica['phase']}, {counted(replica['layers'], 'layer')}"
        + (f", {replica['load']} from {replica['source']}" if replica["load"] else "")
        + f", {counted(replica['requests'], 'request')}"
        for replica in status["replicas"]
    ]
    latest = [f"  {each['before']} -> {each['after']} {each['role']}: {each['why']}" for each in status["decisions"][-5:]]
    return roles + replicas + latest
