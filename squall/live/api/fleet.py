"""The administrator's side: what the fleet does and why, and how many replicas somebody wants.

Knows the frontend. Who may ask is looked at before (`gate.py`): with `serve.api_keys` only who has a key.
"""

from __future__ import annotations

import asyncio

from squall.core.types import Role
from squall.errors import ConfigError, RequestError
from squall.live.api.exchange import Exchange
from squall.live.api.fields import Fields, is_integer, wrong
from squall.live.api.order import known_model
from squall.live.frontend import Frontend

MOST = 100_000
"""No fleet has more."""


class FleetService:
    """
    Args:
        frontend: whose fleet it is.
    """

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def status(self, exchange: Exchange) -> None:
        await exchange.reply_json(self._frontend.fleet())

    async def scale(self, exchange: Exchange) -> None:
        """`{"replicas": 3, "role": "both"}`; without a number the policy decides again. Answers with what comes of it."""
        fields = Fields(await exchange.json_object())
        if (name := fields.text("model")) is not None:
            known_model(name, self._frontend)
        role, count = self._role(fields.text("role")), fields.get("replicas")
        if count is not None and not (is_integer(count) and 0 <= count <= MOST):
            raise wrong("replicas", f"a number from 0 to {MOST}, or null", count)
        try:
            self._frontend.want(role, count)
        except ConfigError as error:
            raise RequestError(f"role: {error}", param="role") from None
        await asyncio.sleep(0)  # the machines' next instant, in which it is decided
        await exchange.reply_json(self._frontend.fleet())

    def _role(self, name: str | None) -> Role:
        """A fleet of one role needs no name."""
        known = [role.role for role in self._frontend.fleet().roles]
        if name is None and len(known) == 1:
            name = known[0]
        if name not in known:
            only = f"{known[0]!r}, the only role of this fleet, or none"
            raise wrong("role", f"one of {', '.join(known)}" if len(known) > 1 else only, name)
        return Role(name)
