"""From a configuration to a replayed run: its workload against the endpoint that it describes, or against any other.

Knows which part makes what, and shows how far it has come. Writes nothing.
"""

from __future__ import annotations

from pathlib import Path

from squall.config import Config
from squall.core.types import SECOND
from squall.errors import ConfigError
from squall.live.replay import ReplayRecord
from squall.live.replay import replay as send
from squall.pools import refuse_pools
from squall.report.progress import progress
from squall.twin.rehearse import offered


def drive(
    config: Config,
    url: str | None = None,
    model: str | None = None,
    *,
    api_key: str | None = None,
    tokenizer: Path | None = None,
    timeout_s: float = 600.0,
    max_in_flight: int | None = None,
) -> ReplayRecord:
    """Replay the workload of `config` against `url`; None is the fleet that `config` itself describes.

    That fleet's accelerators count for the whole run, if it keeps its size; what a fleet holds that follows its load, or another
    endpoint, a client does not know.

    Raises:
        ConfigError: there is no workload, or nobody answers at the endpoint.
    """
    if config.run.duration_s is not None:
        raise ConfigError("run.duration_s ends simulations; a replay ends with its workload: say workload.duration_s")
    refuse_pools(config, "squall replay")
    requests = offered(config)
    serve = config.serve
    ours = url is None
    emulated = ours and serve.engine == "emulated"
    dilation = serve.time_dilation if emulated else 1.0
    seconds = requests[-1].arrived_at / SECOND * dilation
    with progress(f"replaying {len(requests)} requests over {seconds:.0f} s", len(requests)) as show:
        record = send(
            url or f"http://{'127.0.0.1' if serve.host == '0.0.0.0' else serve.host}:{serve.port}",
            model or (config.model.served_as or (config.model.name,))[0],
            requests,
            api_key=api_key or next(iter(serve.api_keys if ours else ()), None),
            tokenizer=tokenizer,
            world="emulated" if emulated else "real",
            time_dilation=dilation,
            timeout_s=timeout_s,
            max_in_flight=max_in_flight,
            seed=config.run.seed,
            block_size=config.replica.block_size,
            progress=lambda done, flying, failed: show(done, f"{done} done, {flying} in flight, {failed} failed"),
        )
    if ours and all(bounds.minimum == bounds.maximum for bounds in config.fleet.bounds.values()):
        record.gpu_nanos = record.ended_at * config.fleet.num_initial * config.replica.tp * config.replica.pp
    return record
