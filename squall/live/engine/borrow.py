"""Map memory that another process lends, and say its checksum: what `squall doctor` asks of a second process.

python -m squall.live.engine.borrow cuda:0      (what is lent comes on standard input, in MessagePack)
"""

import sys

import msgspec
import torch

from squall.errors import TransferFailed
from squall.live.engine.device_memory import TorchMemory
from squall.live.engine.devices import device_for
from squall.live.transport.device import Lent, Unreachable


def main(device: str) -> int:
    lent = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Lent)
    here = [(0, lent.num_bytes)]
    memory = TorchMemory.allocate([device_for(lent, torch.device(device))], lent.num_bytes)
    try:
        mapped = memory.open([lent])
        memory.copy(mapped, here, here)
        mapped.close()
    except (Unreachable, TransferFailed) as error:
        sys.stderr.write(f"cannot be mapped: {error}\n")
        return 1
    sys.stdout.write(f"{memory.digest(here)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
