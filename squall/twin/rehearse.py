"""From a configuration to a simulated run: builds the workload, prices and KV pool that it describes, and simulates.

Knows which part makes what. Reads what the configuration names (a trace, a profile, a config.json) and writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from squall.config import Config
from squall.core.fleet_plan import Share
from squall.core.metrics import RunRecord
from squall.core.types import FOREVER, SECOND, Nanos
from squall.errors import ConfigError
from squall.perf.catalogue import resolve_model
from squall.perf.hardware import resolve_gpu
from squall.perf.latency import LatencyModel
from squall.pools import alike, num_gpus, price_of
from squall.sim.ground import Ground, ground
from squall.sim.kinds import Kind, each, kinds_of
from squall.sim.observe import Created, Observer, watched
from squall.sim.prepare import prepare
from squall.sim.run import simulate
from squall.sim.seats import EventLog as Log
from squall.sim.swap import with_copies
from squall.workload.build import build
from squall.workload.spec import OfferedRequest

if TYPE_CHECKING:
    from squall.report.progress import SimulationProgress
    from squall.sim.observe import Watcher


def rehearse(config: Config, watchers: Sequence[Watcher] = (), progress: SimulationProgress | None = None) -> RunRecord:
    """Simulate the fleet of `config` under its workload, while `watchers` look on and `progress` shows how far it is.

    The record holds what was seen of the engines where `[run]` asks for it.

    Raises:
        ConfigError: it has no workload, or names something that is not there or does not fit.
    """
    if progress is not None:
        progress.phase("reading the workload")
    parts = parts_of(config, (*watchers, *([] if progress is None else [progress])))
    if progress is not None:
        progress.phase("simulating", len(parts.requests))
    observer = parts.observer
    record = simulate(
        config, parts.requests, parts.latency, parts.num_blocks, ground=parts.ground, kinds=parts.kinds, until=ends_at(config),
        log=parts.log, cut_off=None if observer is None else observer.cut_off, created=parts.created,
    )  # fmt: skip
    record.observed = observer.observed if observer is not None else None
    return record


class Parts(NamedTuple):
    """What a simulation is put together from; see `sim.run.Body`. `observer` is among those who are told by `log`."""

    requests: list[OfferedRequest]
    latency: LatencyModel
    num_blocks: int
    ground: Ground
    kinds: list[Kind]
    observer: Observer | None
    log: Log | None
    created: Created | None


def parts_of(config: Config, watchers: Sequence[Watcher] = (), share: Share | None = None) -> Parts:
    """`share` is the place of the fleet on a cluster where there are others. Raises as `rehearse`."""
    requests = offered(config, honours_after=True)
    if config.run.series_s is not None and requests:
        from squall.report.series import num_bins  # only now: it needs numpy

        num_bins(min(requests[-1].arrived_at, ends_at(config)), config.run.series_s)  # a run lasts at least as long
    model, gpu = resolve_model(config.model.name), resolve_gpu(config.cluster.gpu)
    kinds = kinds_of(config, model)
    latency, blocks = prepare(config, model, gpu) if not kinds else (kinds[0].latency, kinds[0].num_blocks)
    stands_on = ground(config, model, gpu, latency, blocks, share)
    latency = with_copies(config, model, gpu, latency) if not kinds else latency
    latencies = {replica: kind.latency for replica, kind in enumerate(each(kinds))}
    observer = Observer(latency, config.replica.block_size, latencies) if observes(config) else None
    log, created = watched([*watchers, *([] if observer is None else [observer])])
    return Parts(requests, latency, blocks, stands_on, kinds, observer, log, created)


def ends_at(config: Config) -> Nanos:
    """When a simulation of it ends, whatever is left to happen."""
    return FOREVER if config.run.duration_s is None else round(config.run.duration_s * SECOND)


def observes(config: Config) -> bool:
    """Whether `[run]` asks for more than what the requests tell."""
    run = config.run
    return run.detail or run.steps or run.trace or run.series_s is not None or run.operators or run.compat is not None


def rehearse_with_events(config: Config, progress: SimulationProgress | None = None) -> tuple[RunRecord, bytes]:
    """As `rehearse`, and the whole event log: some eight bytes an event."""
    from squall.eventlog import EventLog  # only now: few simulations write one

    file = BytesIO()
    events = EventLog(file)
    record = rehearse(config, [events], progress)
    events.flush()
    return record, file.getvalue()


def offered(config: Config, *, honours_after: bool = False) -> list[OfferedRequest]:
    """The requests of the configuration's workload; `honours_after` as in `build`. Raises ConfigError."""
    if config.workload is None:
        raise ConfigError("there is no [workload]: say what arrives, as examples/azure-conv.toml does")
    return build(config.workload, config.run.seed, Path(), config.replica.block_size, honours_after=honours_after)


def usd_per_gpu_hour(config: Config) -> float | None:
    """What an accelerator hour costs: the configuration's word, else the catalogue's; None for this machine's CPU.

    Of replicas that are not alike: the mean over their GPUs, which are all held equally long.
    """
    parts = alike(config)
    if len(parts) == 1:
        return price_of(config)
    prices = [price_of(part) for part in parts]
    gpus = [num_gpus(part) for part in parts]
    known = [price * count for price, count in zip(prices, gpus, strict=True) if price is not None]
    return sum(known) / sum(gpus) if len(known) == len(parts) else None
