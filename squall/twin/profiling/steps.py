"""Whole steps of the built-in engine, to find what a step costs beside its operators, and how well operators tell steps.

Knows how to bring an engine up with a checkpoint's weights, or with random ones where there is only a config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles

import torch
from msgspec import Struct

from squall.core.actions import Chunk, RunSteps
from squall.live.engine.architecture import FAMILIES, read_decoder_config
from squall.live.engine.jsonfile import read_json
from squall.live.engine.tokenizer import ByteTokenizer
from squall.live.engine.torch_engine import TorchEngine
from squall.perf.composed import Composed
from squall.perf.latency import UNITS_PER_NANO
from squall.perf.profile import Point
from squall.twin.sweep import sweep

UNITS_PER_SECOND = UNITS_PER_NANO * 1_000_000_000


class RandomEngine(TorchEngine):
    """The built-in engine with weights that mean nothing: of a config.json, whose checkpoint need not be here."""

    def load(self) -> None:
        """See `Engine`. Raises ModelError for the configuration."""
        self.build()
        noise = torch.Generator().manual_seed(0)
        region = self.weights.arena.region
        for index, section in enumerate(region.sections):
            for _, view in self.weights.places[section.name]:
                view.copy_(torch.empty(view.shape).uniform_(-0.03, 0.03, generator=noise))
            region.publish(index)


def engine(
    folder: Path, *, num_blocks: int, block_size: int, max_model_len: int, device: str, dtype: str, threads: int
) -> TorchEngine:
    """An engine that is ready: with the checkpoint's weights where they are in `folder`, else with random ones.

    Raises ModelError for a model that the built-in engine does not run.
    """
    kind = TorchEngine if any(folder.glob("*.safetensors")) else RandomEngine
    made = kind(
        folder, ByteTokenizer(), num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len,
        device=device, dtype=dtype, threads=threads,
    )  # fmt: skip
    made.load()
    made.warm()
    return made


def runs(folder: Path) -> bool:
    """Whether the built-in engine runs the model of that config.json."""
    config = folder / "config.json"
    if not config.is_file() or read_json(config).get("model_type") not in FAMILIES:
        return False
    read_decoder_config(folder)
    return True


def whole_steps(ready: TorchEngine, clock: Callable[[], int]) -> Iterator[Point]:
    """Steps of many shapes, one at a time, over and over; none where the engine has room for none.

    `clock` tells nanoseconds, as operators were measured by.
    """
    while (first := next(points := sweep(ready, clock=clock), None)) is not None:
        yield first
        yield from points


class Fit(Struct, frozen=True):
    """How well operators and an overhead tell whole steps.

    Attributes:
        step_s: what a step costs beside its operators.
        median_error, p90_error: of steps that the overhead was not fitted to, relative.
        num_fitted, num_held_out: steps.
    """

    step_s: float
    median_error: float
    p90_error: float
    num_fitted: int
    num_held_out: int


def fit_overhead(model: Composed, points: Sequence[Point]) -> Fit:
    """The overhead from every other step, judged by those between. `model` prices operators alone (overhead 0); two steps
    or more. Least absolute relative errors: the median of what is left over, steps weighing as much as they are short."""
    ordered = sorted(points, key=lambda point: (point.num_decodes, point.chunk_tokens, point.decode_context, point.chunk_offset))
    fitted, held_out = ordered[::2], ordered[1::2]
    step_s = max(0.0, _weighted_median([(point.seconds - price(model, point), 1 / point.seconds) for point in fitted]))
    errors = sorted(abs((price(model, point) + step_s) / point.seconds - 1) for point in held_out)
    p90 = quantiles(errors, n=10, method="inclusive")[-1] if len(errors) > 1 else errors[0]
    return Fit(step_s, median(errors), p90, len(fitted), len(held_out))


def price(model: Composed, point: Point) -> float:
    """Seconds that a latency model gives a step."""
    chunks = (Chunk(0, point.chunk_offset, point.chunk_tokens, 0, point.last),) if point.chunk_tokens else ()
    return model.run(RunSteps(0, 1, point.num_decodes, point.decode_context, chunks), 1)[0].first / UNITS_PER_SECOND


def _weighted_median(values: Sequence[tuple[float, float]]) -> float:
    ordered = sorted(values)
    half = sum(weight for _, weight in ordered) / 2
    for value, weight in ordered:
        half -= weight
        if half <= 0:
            return value
    return ordered[-1][0]
