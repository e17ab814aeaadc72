"""How far predictions are from every public measurement that can be compared with, without a GPU.

    python benchmarks/fidelity.py [--smoke] [--write]

One line a figure: what was compared, in which setup, how many points, the error and the goal. The measurements are not shipped:
they lie beside the checkout (or under $SQUALL_SHARED), and without them nothing is compared. Measured operator times for NVIDIA's
deployments come from the installed package aiconfigurator-core (`pip install 'squall[measured]'`); without it those lines say so.

`--write` keeps the figures in fidelity_summary.json: our errors only, none of the measurements. Every run compares with it, and
ends with exit code 1 when a figure has become worse by more than a tenth and half a point; `--smoke` looks at a part of the
points, whose own figures are kept beside the others.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.scoreboard import deployments, heldout, operators, published, rtx4090, silicon, theirs  # noqa: E402
from benchmarks.scoreboard.rows import Row  # noqa: E402
from squall.perf.tables.installed import installed_root  # noqa: E402

SHARED = Path(os.environ.get("SQUALL_SHARED", ROOT.parent / "shared"))
SUMMARY = Path(__file__).with_name("fidelity_summary.json")


def compare(smoke: bool) -> Iterator[Row]:
    """The lines, in order."""
    yield from rtx4090.compare(SHARED)
    if installed_root() is None:
        print("(no aiconfigurator-core: its deployments are priced from the datasheet only)")
    else:
        rows, points = silicon.compare(SHARED, 80 if smoke else 1)
        yield from rows
        yield from theirs.compare(points)
        if not smoke:
            yield from deployments.compare(silicon.others(SHARED), 3)
    for kind in ("datasheet",) if smoke else ("roofline", "datasheet"):
        yield from silicon.compare(SHARED, 80 if smoke else 1, kind)[0]
    yield from operators.compare(SHARED, 20 if smoke else 1)
    yield from operators.beyond(SHARED)
    if not smoke:
        yield from heldout.compare(SHARED, 2)
        yield from published.splitwise(SHARED)
        yield from published.nim(SHARED)
        yield from published.throughput(SHARED)
        yield from published.inference_perf(SHARED)


def worse(rows: list[Row], kept: dict[str, float]) -> list[str]:
    """What has become worse than it was, beyond noise. Training times are the machine's."""
    said = []
    for row in rows:
        before = kept.get(row.key)
        if before is None or row.unit == "CPU s":
            continue
        if row.unit == "% inside":
            bad = row.value < before - 2
        else:
            bad = row.value > 1.1 * before + 0.5
        if bad:
            said.append(f"{row.key} was {before:.2f} and is {row.value:.2f}")
    return said


def line(row: Row) -> str:
    goal = "" if row.goal is None else f"{row.goal:g} {row.verdict}"
    return f"{row.metric:38.38} {row.setup:76.76} {row.count:6} {row.value:9.2f} {row.unit:8} {goal}"


def main() -> int:
    smoke = "--smoke" in sys.argv
    if not (SHARED / "data" / "published").is_dir():
        print(f"nothing to compare with: no measurements at {SHARED} (set SQUALL_SHARED to their folder)")
        return 0
    began = time.perf_counter()
    print(f"{'metric':38} {'setup':76} {'points':>6} {'value':>9} {'unit':8} goal")
    rows = []
    for row in compare(smoke):
        rows.append(row)
        print(line(row), flush=True)
    print(f"{len(rows)} lines in {time.perf_counter() - began:.0f} s")
    part = "smoke" if smoke else "full"
    kept = json.loads(SUMMARY.read_text()) if SUMMARY.is_file() else {}
    if "--write" in sys.argv:
        kept[part] = {row.key: round(row.value, 2) for row in rows if not row.key.startswith("theirs.")}
        SUMMARY.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
        print(f"wrote {SUMMARY}")
    regressions = worse(rows, kept.get(part, {}))
    for text in regressions:
        print(f"worse: {text}")
    return 1 if regressions else 0


if __name__ == "__main__":
    sys.exit(main())
