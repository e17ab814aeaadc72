"""Ordinary memory in the place of GPUs', under all that knows of devices: lent to other processes, or reached by the host."""

import pytest
import torch

from squall.live.engine import devices
from squall.live.engine.devices import Device, Shared


def lent(_: torch.device) -> Device:
    """In the place of `devices.device_of`: peers of this machine map it."""
    return Shared()


def unlent(_: torch.device) -> Device:
    """Nobody can map it."""
    return Shared(lends=False)


HOMES = {"memory": devices.device_of, "lent": lent, "unlent": unlent}
"""Where weights and KV lie: in host memory itself, or on what stands for devices."""


def put_on(home: str) -> None:
    """All that this process allocates from now on; for processes of their own."""
    setattr(devices, "device_of", HOMES[home])  # noqa: B010


@pytest.fixture(params=HOMES)
def homes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(devices, "device_of", HOMES[request.param])
    return str(request.param)
