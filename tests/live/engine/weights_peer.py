"""A worker's weights in a process of its own: `python -m tests.live.engine.weights_peer NAME CHECKPOINT GBPS disk|peer HOME`.

Prints its addresses, with `peer` reads its sources (JSON) from standard input first, and serves until its input ends.
"""

import json
import sys
import threading
from pathlib import Path

import torch

from squall.live.engine.architecture import read_decoder_config
from squall.live.engine.loader import load_from_disk, load_from_peers
from squall.live.engine.weights import allocate
from squall.live.transport.endpoint import Endpoint
from squall.live.transport.fetch import Source
from tests.live.as_devices import HOMES, put_on


def main() -> None:
    name, folder, gbps, kind, home = sys.argv[1:]
    config = read_decoder_config(Path(folder))
    device = torch.device(home if home == "cuda" else "cpu")
    if home in HOMES:
        put_on(home)
    weights = allocate(config, torch.float32, device, chunk_bytes=16384)
    endpoint = Endpoint(name, "t", gbps=float(gbps), patience_s=5)
    endpoint.register(weights.arena.region)
    if kind == "disk":
        load_from_disk(weights, Path(folder), tied=config.tied)
    sys.stdout.write(json.dumps(endpoint.addresses) + "\n")
    sys.stdout.flush()
    if kind == "peer":
        sources = [Source(tuple(json.loads(sys.stdin.readline())))]
        threading.Thread(target=load_from_peers, args=(weights, endpoint, sources), daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
