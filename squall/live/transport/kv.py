"""KV blocks from one engine's pool into another's: what is offered, taken and acknowledged. Knows pools and blocks, no tensors.

The receiver pulls. The sender keeps the blocks until the receiver has said that it has them, layers checked; a half of the
layers may come from one engine and the other half from another. Block numbers differ on both sides: each has its own table.
"""

import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import xxhash
from msgspec import Struct

from squall.core.types import RequestId
from squall.errors import ConfigError, PeerLost, PeerRefused, TransferFailed
from squall.live.transport.interface import Link, Transport
from squall.live.transport.region import Region, Segment

KV = "kv"
"""The region's name, the same to all peers."""

ATTEMPTS = 3
"""How often a sender is dialled without a layer more, and how often a layer may come wrong."""

_PAUSE_S = 0.05


class Pool(Struct, frozen=True):
    """How a KV region is laid out: [num_layers, keys and values, num_blocks, block_bytes]."""

    num_layers: int
    num_blocks: int
    block_bytes: int

    def segments(self, layer: int, blocks: Sequence[int]) -> list[Segment]:
        """Where the keys, then the values, of these blocks lie. Raises PeerRefused for a layer or block that there is not."""
        if not 0 <= layer < self.num_layers or not blocks or min(blocks) < 0 or max(blocks) >= self.num_blocks:
            raise PeerRefused(f"layer {layer} of blocks {list(blocks)[:4]}... is not in a pool of {self}")
        rows = (2 * layer, 2 * layer + 1)
        return [((row * self.num_blocks + block) * self.block_bytes, self.block_bytes) for row in rows for block in blocks]


class KvOffer(Struct, frozen=True):
    """A sender's word, carried by the control plane to the receiver: this KV may be fetched here.

    Attributes:
        first, last: layers [first, last).
        num_tokens: whose KV it is, from the sequence's start.
        blocks: which hold them, in order, in the sender's `pool`.
        sums: a checksum for each layer (XXH3, 64 bits).
        addresses, fingerprint: of the sender, and of what is in its pool.
    """

    request: RequestId
    first: int
    last: int
    num_tokens: int
    blocks: tuple[int, ...]
    sums: tuple[int, ...]
    pool: Pool
    addresses: tuple[str, ...]
    fingerprint: str


class KvTaken(Struct, frozen=True, tag=True):
    """The receiver's word to the sender: layers [first, last) are here and right."""

    request: RequestId
    first: int
    last: int


def offer(
    region: Region,
    pool: Pool,
    addresses: tuple[str, ...],
    request: RequestId,
    num_tokens: int,
    blocks: Sequence[int],
    layers: tuple[int, int],
) -> KvOffer:
    """What a sender says of a sequence that stands still; its blocks must stay until they are taken."""
    sums = tuple(_digest(region, pool.segments(layer, blocks)) for layer in range(*layers))
    return KvOffer(request, *layers, num_tokens, tuple(blocks), sums, pool, addresses, region.fingerprint)


def pull(transport: Transport, offered: KvOffer, region: Region, pool: Pool, blocks: Sequence[int]) -> int:
    """Fetch what is offered into `blocks` of our own pool, and tell the sender that it is here.

    A broken connection is taken up again at the layer. Blocks of one call must be nobody else's until it returns.

    Returns:
        The bytes that were fetched.

    Raises:
        PeerRefused: the pools differ, or the sender has withdrawn it. TransferFailed: it could not be had.
    """
    if region.fingerprint != offered.fingerprint or pool.block_bytes != offered.pool.block_bytes:
        raise PeerRefused(f"KV of {offered.fingerprint} is offered; here is {region.fingerprint}")
    if len(blocks) != len(offered.blocks) or len(offered.sums) != offered.last - offered.first:
        raise PeerRefused(
            f"{len(offered.blocks)} KV blocks and {len(offered.sums)} checksums are offered for {len(blocks)} blocks"
        )
    layer, attempts, reason, link = offered.first, 0, "", None
    while attempts < ATTEMPTS:
        try:
            link = link or _dial(transport, offered)
            while layer < offered.last:
                if _pull_layer(link, offered, region, pool, layer, blocks):
                    layer, attempts = layer + 1, 0
                elif (attempts := attempts + 1) == ATTEMPTS:
                    reason = f"layer {layer} came {ATTEMPTS} times with a wrong checksum"
                    break
            else:
                link.notify(msgspec.msgpack.encode(KvTaken(offered.request, offered.first, offered.last)))
                return 2 * (offered.last - offered.first) * len(blocks) * pool.block_bytes
        except PeerLost as error:
            reason, attempts = str(error), attempts + 1
            if link is not None:
                link.close()
            link = None
            time.sleep(_PAUSE_S)
        finally:
            if link is not None and (layer == offered.last or attempts == ATTEMPTS):
                link.close()
    raise TransferFailed(f"KV of request {offered.request}, layers {offered.first} to {offered.last - 1}: {reason}")


class Ledger:
    """A sender's account of offers that nobody has taken yet. From any thread.

    Args:
        free: told of a request all of whose offered layers have been taken: its blocks are the sender's again.
    """

    def __init__(self, free: Callable[[RequestId], None]) -> None:
        self._free = free
        self._owed: dict[RequestId, set[tuple[int, int]]] = {}
        self._lock = threading.Lock()

    def offered(self, request: RequestId, first: int, last: int) -> None:
        with self._lock:
            self._owed.setdefault(request, set()).add((first, last))

    def on_notify(self, _node: str, payload: bytes) -> None:
        """For `Transport`: a receiver has spoken. What makes no sense, or comes twice, is passed over."""
        try:
            taken = msgspec.msgpack.decode(payload, type=KvTaken)
        except msgspec.DecodeError:
            return
        with self._lock:
            owed = self._owed.get(taken.request, set())
            if (taken.first, taken.last) not in owed:
                return
            owed.remove((taken.first, taken.last))
            if owed:
                return
            del self._owed[taken.request]
        self._free(taken.request)

    def withdraw(self, request: RequestId) -> bool:
        """The receiver will not come: whether its blocks were still kept for it, and are the sender's again."""
        with self._lock:
            return self._owed.pop(request, None) is not None


def _dial(transport: Transport, offered: KvOffer) -> Link:
    reason: PeerLost | ConfigError | None = None
    for address in offered.addresses:
        try:
            link = transport.connect(address)
        except (PeerLost, ConfigError) as error:
            reason = error
            continue
        try:
            link.open(KV, offered.fingerprint)
        except BaseException:
            link.close()
            raise
        return link
    raise PeerLost(str(reason) if reason else "it has no address")


def _pull_layer(link: Link, offered: KvOffer, region: Region, pool: Pool, layer: int, blocks: Sequence[int]) -> bool:
    """Whether it matches its checksum."""
    here = pool.segments(layer, blocks)
    link.read(KV, offered.pool.segments(layer, offered.blocks), [region.view(segment) for segment in here])
    return _digest(region, here) == offered.sums[layer - offered.first]


def _digest(region: Region, segments: Sequence[Segment]) -> int:
    digest = xxhash.xxh3_64()
    for segment in segments:
        digest.update(region.view(segment))
    return digest.intdigest()
