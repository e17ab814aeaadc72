"""The commands that ask about a model on a GPU: `squall plan`, does it fit, and `squall latency`, how long does a step take.

Parts are imported by the command that needs them, as in `cli`. Knows no part's insides.
"""

from typing import Annotated

import typer

from squall.errors import ConfigError
from squall.options import Settings, named_as_typed, option

SHAPE = {"model.name": "MODEL", "cluster.gpu": "--gpu", "replica.tp": "--tp", "replica.pp": "--pp", "replica.ep": "--ep"}

ACCOUNT = {
    "replica.dtype": "--dtype", "replica.kv_dtype": "--kv-dtype", "replica.max_model_len": "--context",
    "replica.block_size": "--block-size", "replica.gpu_memory_utilization": "--gpu-memory-utilization",
    "batching.max_num_seqs": "--max-num-seqs", "batching.max_num_batched_tokens": "--max-num-batched-tokens",
}  # fmt: skip
"""Keys that have options here: what is wrong with them is said of these."""


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A known model, a config.json or a checkpoint directory.")],
    gpu: Annotated[str, option("A known GPU, or a TOML file that describes one.")],
    tp: Annotated[list[int] | None, option("GPUs that share every layer; may be repeated. 1, 2, 4 and 8 when absent.")] = None,
    pp: Annotated[int, typer.Option(help="Pipeline stages.", min=1)] = 1,
    ep: Annotated[int, typer.Option(help="GPUs that experts are dealt out over.", min=1)] = 1,
    context: Annotated[int | None, option("The longest sequence; 8192, or all the model knows, when absent.", min=1)] = None,
    dtype: Annotated[
        str, typer.Option(help="replica.dtype, or fp8, int8, int4, nvfp4, mxfp4 for a quantised checkpoint")
    ] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="replica.kv_dtype")] = "auto",
    max_num_seqs: Annotated[int, typer.Option(help="batching.max_num_seqs")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="batching.max_num_batched_tokens")] = 2048,
    gpu_memory_utilization: Annotated[float, typer.Option(help="replica.gpu_memory_utilization")] = 0.9,
    block_size: Annotated[int, typer.Option(help="replica.block_size")] = 16,
    graphs: Annotated[bool, typer.Option(help="Capture decode steps as graphs.")] = True,
) -> None:
    """Does a model fit on a GPU, and how much KV cache is left?"""
    from squall.perf.catalogue import resolve_model
    from squall.perf.hardware import resolve_gpu
    from squall.perf.memory import Deployment
    from squall.perf.plan import options
    from squall.report.plan import plan_lines

    with named_as_typed(SHAPE | ACCOUNT):
        spec, sheet = resolve_model(model), resolve_gpu(gpu)
        wanted = Deployment(
            1, pp, ep, dtype, kv_dtype, block_size, gpu_memory_utilization, max_num_batched_tokens, max_num_seqs,
            context or min(8192, spec.max_position), graphs,
        )  # fmt: skip
        found = options(spec, sheet, wanted, tp or (1, 2, 4, 8))
    for line in plan_lines(spec, sheet, found):
        typer.echo(line)


def latency(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A known model, a config.json or a checkpoint directory.")],
    gpu: Annotated[str, option("A known GPU, or a TOML file that describes one.")],
    batch: Annotated[int, typer.Option(help="Requests that decode a token each.", min=0)] = 32,
    context: Annotated[int, typer.Option(help="Tokens that each of them attends to.", min=1)] = 1024,
    chunk: Annotated[int, typer.Option(help="Tokens of a prompt in the same step.", min=0)] = 0,
    before: Annotated[int, typer.Option(help="Tokens of that prompt which are computed already.", min=0)] = 0,
    tp: Annotated[int, typer.Option(help="GPUs that share every layer.", min=1)] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.", min=1)] = 1,
    ep: Annotated[int, typer.Option(help="GPUs that experts are dealt out over.", min=1)] = 1,
    settings: Settings = None,
) -> None:
    """How long does a step take, operator by operator, and how sure is that?"""
    from squall.config import load
    from squall.core.actions import Chunk, RunSteps
    from squall.perf.build import joined, operators_model
    from squall.perf.catalogue import resolve_model
    from squall.perf.hardware import resolve_gpu
    from squall.report.latency import latency_lines

    if batch + chunk == 0:
        raise ConfigError("a step of nothing takes no time; give --batch or --chunk")
    with named_as_typed(SHAPE):
        resolved = load(None, [*(settings or ()), f"replica.tp={tp}", f"replica.pp={pp}", f"replica.ep={ep}"])
        sheet, links = joined(resolve_gpu(gpu), resolved.cluster, tp)
        priced = operators_model(resolved.latency, resolve_model(model), sheet, resolved.replica, links=links)
    chunks = (Chunk(0, before, chunk, 0, True),) if chunk else ()
    for line in latency_lines(priced.source, priced.explain(RunSteps(0, 1, batch, batch * context, chunks))):
        typer.echo(line)
