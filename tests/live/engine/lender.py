"""A process that lends a device's memory: `python -m tests.live.engine.lender memory|cuda SEED PARTS`.

Prints what others must know to map it (JSON), and keeps it until its input ends.
"""

import json
import sys

from tests.live.engine.test_device_memory import filled, on


def main() -> None:
    kind, seed, parts = sys.argv[1], *map(int, sys.argv[2:])
    memory = filled(on(kind), seed, parts)
    lent = [(each.kind, each.device, each.process, each.handle.hex(), each.num_bytes) for each in memory.lent]
    sys.stdout.write(json.dumps(lent) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
