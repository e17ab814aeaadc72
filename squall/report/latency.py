"""One step of a model as lines of text: its operators with their times, where those are from, and how sure they are.

Knows no latency model: it gets the lines of `perf.composed`.
"""

from collections.abc import Sequence

from squall.perf.composed import Line, interval_of, shares_of

_WIDTHS = (34, 13, 6, 12, 7, 8)


def latency_lines(source: str, lines: Sequence[Line]) -> list[str]:
    """A heading, a row an operator (the most expensive first within its stage), and what they come to together."""
    seconds, low, high = interval_of(lines)
    out = [source, ""]
    for stage in sorted({line.stage for line in lines}):
        inside = sorted((line for line in lines if line.stage == stage), key=lambda line: -line.seconds)
        if any(line.stage != stage for line in lines):
            out.append(f"stage {stage}: {_time(sum(line.seconds for line in inside))}")
        out.append(_row("operator", "class", "times", "together", "share", "+-", "from"))
        out.extend(
            _row(
                line.operator, line.kind, str(line.count), _time(line.seconds), f"{line.seconds / seconds:.1%}",
                f"{line.spread:.0%}", _origin(line),
            )
            for line in inside
        )  # fmt: skip
        out.append("")
    shares = ", ".join(f"{share:.0%} {kind.value}" for kind, share in shares_of(lines))
    out.append(f"one step: {_time(seconds)}, nine times in ten between {_time(low)} and {_time(high)}; operators: {shares}")
    return out


def _origin(line: Line) -> str:
    kind = line.provenance.value
    return kind if line.source == kind else f"{kind} ({line.source})"


def _row(*cells: str) -> str:
    first, kind, *numbers, last = cells
    middle = " ".join(cell.rjust(width) for cell, width in zip(numbers, _WIDTHS[2:], strict=True))
    return f"{first.ljust(_WIDTHS[0])} {kind.ljust(_WIDTHS[1])} {middle}  {last}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
