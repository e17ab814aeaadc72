"""The endpoints of a head that serves several models: each model's own, chosen by the request's `model`.

Knows names and which services there are; what an endpoint does, `service.py` and `fleet.py` know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import to_builtins

from squall.live.api.exchange import Exchange
from squall.live.api.fields import Fields
from squall.live.api.fleet import FleetService
from squall.live.api.order import missing_model, unknown_model
from squall.live.api.service import Service
from squall.live.frontend import Frontend


class Part(NamedTuple):
    """One model, and what answers for it."""

    frontend: Frontend
    service: Service
    fleet: FleetService


class Several:
    """
    Args:
        parts: of each model; at least one. What is of no model, the first answers.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._first = parts[0]
        self._of_name = {name: part for part in parts for name in part.frontend.model_names}

    # -- by the model of the body

    async def chat_completions(self, exchange: Exchange) -> None:
        await (await self._chosen(exchange)).service.chat_completions(exchange)

    async def completions(self, exchange: Exchange) -> None:
        await (await self._chosen(exchange)).service.completions(exchange)

    async def tokenize(self, exchange: Exchange) -> None:
        await (await self._chosen(exchange)).service.tokenize(exchange)

    async def detokenize(self, exchange: Exchange) -> None:
        await (await self._chosen(exchange)).service.detokenize(exchange)

    async def scale(self, exchange: Exchange) -> None:
        await (await self._chosen(exchange)).fleet.scale(exchange)

    async def _chosen(self, exchange: Exchange) -> Part:
        """Raises RequestError for a model that is not served, or not named though there is a choice."""
        name = Fields(await exchange.json_object()).text("model")
        if name is None:
            raise missing_model()
        return self._named(name)

    def _named(self, name: str) -> Part:
        part = self._of_name.get(name)
        if part is None:
            raise unknown_model(name, tuple(self._of_name))
        return part

    # -- of all

    async def models(self, exchange: Exchange) -> None:
        listed = [entry for part in self._parts for entry in part.service.listed()]
        await exchange.reply_json({"object": "list", "data": listed})

    async def model(self, exchange: Exchange) -> None:
        await self._named(exchange.path_params["id"]).service.model(exchange)

    async def status(self, exchange: Exchange) -> None:
        fleets = [
            {"model": part.frontend.model_names[0], **to_builtins(part.frontend.fleet(), str_keys=True)} for part in self._parts
        ]
        await exchange.reply_json({"models": fleets})

    async def health(self, exchange: Exchange) -> None:
        """Well as long as some model is."""
        await self._best.service.health(exchange)

    async def accepting(self, exchange: Exchange) -> None:
        await self._best.service.accepting(exchange)

    @property
    def _best(self) -> Part:
        return next((part for part in self._parts if part.frontend.ready), self._first)

    async def load(self, exchange: Exchange) -> None:
        await exchange.reply_json({"server_load": sum(part.service.in_flight for part in self._parts)})

    async def alive(self, exchange: Exchange) -> None:
        await self._first.service.alive(exchange)

    async def version(self, exchange: Exchange) -> None:
        await self._first.service.version(exchange)

    async def metrics(self, exchange: Exchange) -> None:
        """Of all: they have one registry."""
        await self._first.service.metrics(exchange)
