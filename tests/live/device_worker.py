"""`squall.live.worker`, whose weights and KV lie on what stands for devices: python -m tests.live.device_worker ..."""

import sys

from squall.live import worker
from tests.live.as_devices import put_on

if __name__ == "__main__":
    put_on("lent")
    sys.exit(worker.main())
