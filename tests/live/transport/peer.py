"""A worker's transport in a process of its own, without an engine: `python peer.py NAME full|empty GBPS sockets|nixl`.

Prints its addresses, reads its sources (JSON) from standard input, prints how it went, and serves until its input ends. Random
weights, the same for all who are full.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from squall.errors import TransferFailed
from squall.live.transport.endpoint import Endpoint
from squall.live.transport.fetch import Fetch, Source
from tests.live.transport.regions import TOKEN, fill, make_region


def say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    name, kind, gbps, way = sys.argv[1:]
    sys.modules["torch"] = None  # type: ignore[assignment]  # NIXL would ask it for CUDA's version, and its import takes long
    region = make_region()
    endpoint = Endpoint(name, TOKEN, gbps=float(gbps), patience_s=2.0, nixl=way == "nixl")
    endpoint.register(fill(region) if kind == "full" else region)
    say(endpoint.addresses)
    if kind == "empty":
        sources = [Source(tuple(addresses), standby=standby) for addresses, standby in json.loads(sys.stdin.readline())]
        try:
            result = Fetch(endpoint, region, sources).run()
            say({"sums": region.sums, "from": result.num_bytes, "repaired": result.num_repaired})
        except TransferFailed as error:
            say({"failed": str(error)})
    sys.stdin.read()


if __name__ == "__main__":
    main()
