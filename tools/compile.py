"""The simulator's hot modules as extension modules, made of the same source by mypyc. Optional: everything works without.

    python tools/compile.py [--remove]

The results lie beside the sources, and Python prefers them: after a change to one of these sources, build again or remove.
A module that defines a `Struct` is not among them, since a compiled class forgets what msgspec made of it; one whose class
inherits from a compiled one is, since an interpreted class cannot.
"""

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
GROUP = "squall_compiled"
HOT = (
    "squall/core/batcher",
    "squall/core/blocks",
    "squall/core/damping",
    "squall/core/decodes",
    "squall/core/disaggregated",
    "squall/core/entries",
    "squall/core/controller",
    "squall/core/demand",
    "squall/core/finish_rate",
    "squall/core/fleet",
    "squall/core/groups",
    "squall/core/handoff",
    "squall/core/handoff_queue",
    "squall/core/handoff_router",
    "squall/core/handoff_source",
    "squall/core/handoff_target",
    "squall/core/horizon",
    "squall/core/live_batch",
    "squall/core/live_routes",
    "squall/core/live_scaling",
    "squall/core/live_source",
    "squall/core/moves",
    "squall/core/nodes",
    "squall/core/placing",
    "squall/core/pipeline",
    "squall/core/prefix_index",
    "squall/core/rates",
    "squall/core/replica",
    "squall/core/replica_index",
    "squall/core/router",
    "squall/core/sources",
    "squall/core/swap",
    "squall/perf/layer_range",
    "squall/perf/prices",
    "squall/perf/progressions",
    "squall/policies/scale/equations",
    "squall/policies/scale/needs",
    "squall/sim/census",
    "squall/sim/driver",
    "squall/sim/engine",
    "squall/sim/handoff",
    "squall/sim/layers",
    "squall/sim/loading",
    "squall/sim/pipeline",
    "squall/sim/network",
    "squall/sim/observe",
    "squall/sim/order",
    "squall/sim/seats",
    "squall/sim/shares",
    "squall/sim/weights",
    "squall/sim/world",
)
"""What every event passes. The policies are not among them: they are `Struct`s."""

BUILD = """
import sys
from mypyc.build import mypycify
from setuptools import setup

name, folder, *sources = sys.argv[1:]
sys.argv[1:] = ["build_ext", "--inplace", "--build-temp", folder, "--build-lib", folder]
modules = mypycify(sources, group_name=name, target_dir=folder, opt_level="3")
setup(name=name, packages=[], py_modules=[], ext_modules=modules)
"""


def main() -> int:
    remove()
    if "--remove" in sys.argv:
        return 0
    missing = what_is_missing()
    if missing:
        print(f"not compiled, and everything works without: {missing}", file=sys.stderr)
        return 0
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-c", BUILD, GROUP, folder, *(f"{module}.py" for module in HOT)]
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode:
        remove()
        print(f"{done.stdout}{done.stderr}not compiled, for the reason above; everything works without", file=sys.stderr)
        return 1
    print(f"{len(HOT)} modules compiled; `make plain` removes them")
    return 0


def what_is_missing() -> str | None:
    for package in ("mypyc", "setuptools"):
        if importlib.util.find_spec(package) is None:
            return f"there is no {package} (pip install 'squall[dev]')"
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"there is no C compiler ({compiler})"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "there are no headers of Python (the package python3-dev, or alike)"
    return None


def remove() -> None:
    """What an earlier build left, of this and other Python versions."""
    for module in (*HOT, f"{GROUP}__mypyc"):
        for path in ROOT.glob(f"{module}.*.so"):
            path.unlink()


if __name__ == "__main__":
    sys.exit(main())
