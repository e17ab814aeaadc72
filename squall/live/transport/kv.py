"""KV blocks from one engine's pool into another's: what is offered, taken and acknowledged. Knows pools and blocks, no tensors.

The receiver pulls. The sender keeps the blocks until the receiver has said that it has them, layers checked; a half of the
layers may come from one engine and the other half from another. Block numbers differ on both sides: each has its own table.
"""

import threading
import time
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from squall.core.types import ReplicaId, RequestId
from squall.errors import ConfigError, PeerLost, PeerRefused, TransferFailed
from squall.live.transport.device import Segment
from squall.live.transport.interface import Link, Transport
from squall.live.transport.region import Region

KV = "kv"
"""The region's name, the same to all peers."""

ATTEMPTS = 3
"""How often a sender is dialled without a layer more, and how often a layer may come wrong."""

_PAUSE_S = 0.05


class Pool(Struct, frozen=True):
    """How a KV region is laid out: [num_ranks, num_layers, keys and values, num_blocks, block_bytes].

    Every rank of a tensor-parallel replica holds its own heads of a sequence, in blocks of the same numbers.
    """

    num_layers: int
    num_blocks: int
    block_bytes: int
    num_ranks: int = 1

    def segments(self, layer: int, blocks: Sequence[int]) -> list[Segment]:
        """Where the keys, then the values, of these blocks lie, rank by rank.

        Raises PeerRefused for a layer or block that there is not.
        """
        if not 0 <= layer < self.num_layers or not blocks or min(blocks) < 0 or max(blocks) >= self.num_blocks:
            raise PeerRefused(f"layer {layer} of blocks {list(blocks)[:4]}... is not in a pool of {self}")
        firsts = (2 * (rank * self.num_layers + layer) for rank in range(self.num_ranks))
        rows = [row for first in firsts for row in (first, first + 1)]
        return [((row * self.num_blocks + block) * self.block_bytes, self.block_bytes) for row in rows for block in blocks]

    def num_bytes(self, num_layers: int, num_blocks: int) -> int:
        """Of so many blocks, in so many layers."""
        return 2 * self.num_ranks * num_layers * num_blocks * self.block_bytes


class KvOffer(Struct, frozen=True):
    """A sender's word, carried by the control plane to the receiver: this KV may be fetched here.

    Attributes:
        first, last: layers [first, last).
        num_tokens: whose KV it is, from the sequence's start.
        blocks: which hold them, in order, in the sender's `pool`.
        sums: a checksum for each layer; see `Region.digest`.
        addresses: of the sender.
        source, to: the replicas; `number`: unlike that of any other offer, also of the same request.
    """

    request: RequestId
    first: int
    last: int
    num_tokens: int
    blocks: tuple[int, ...]
    sums: tuple[int, ...]
    pool: Pool
    addresses: tuple[str, ...]
    source: ReplicaId = 0
    to: ReplicaId = 0
    number: int = 0


class KvTaken(Struct, frozen=True, tag=True):
    """The receiver's word to the sender: layers [first, last) of offer `number` are here and right."""

    request: RequestId
    first: int
    last: int
    number: int = 0


def offer(
    region: Region,
    pool: Pool,
    addresses: tuple[str, ...],
    request: RequestId,
    num_tokens: int,
    blocks: Sequence[int],
    layers: tuple[int, int],
    ends: tuple[ReplicaId, ReplicaId] = (0, 0),
    number: int = 0,
) -> KvOffer:
    """What a sender says of a sequence that stands still; its blocks must stay until they are taken."""
    sums = tuple(region.digest(pool.segments(layer, blocks)) for layer in range(*layers))
    return KvOffer(request, *layers, num_tokens, tuple(blocks), sums, pool, addresses, *ends, number)


class Stop:
    """Lets somebody else end a `pull`. From any thread."""

    def __init__(self) -> None:
        self.wanted = False
        self._link: Link | None = None
        self._changed = threading.Condition()

    def stop(self) -> None:
        """What is under way raises at once, and nothing is begun any more."""
        with self._changed:
            self.wanted = True
            if self._link is not None:
                self._link.interrupt()

    def settle(self) -> None:
        """After `stop`: return once nothing comes any more. A sender that is being dialled, and may hang, is not waited for."""
        with self._changed:
            self._changed.wait_for(lambda: self._link is None)

    def watch(self, link: Link | None) -> None:
        """The connection that bytes come by now, None once they do not. Raises TransferFailed where none are wanted any more."""
        with self._changed:
            if self.wanted and link is not None:
                raise TransferFailed("it is not wanted any more")
            self._link = link
            self._changed.notify_all()


def pull(
    transport: Transport,
    offered: KvOffer,
    region: Region,
    pool: Pool,
    blocks: Sequence[int],
    stop: Stop | None = None,
) -> int:
    """Fetch what is offered into `blocks` of our own pool, and tell the sender that it is here.

    A broken connection is taken up again at the layer. Blocks of one call must be nobody else's until it returns; `stop` makes it
    return soon.

    Returns:
        The bytes that were fetched.

    Raises:
        PeerRefused: the sender's pool holds other KV than ours. TransferFailed: it could not be had.
    """
    stop = stop or Stop()
    if len(blocks) != len(offered.blocks) or len(offered.sums) != offered.last - offered.first:
        raise PeerRefused(
            f"{len(offered.blocks)} KV blocks and {len(offered.sums)} checksums are offered for {len(blocks)} blocks"
        )
    layer, attempts, reason, link = offered.first, 0, "it is not wanted any more", None
    try:
        while attempts < ATTEMPTS and not stop.wanted:
            try:
                link = link or dial(transport, offered.addresses, KV, region.fingerprint, region)
                stop.watch(link)
                while layer < offered.last and attempts < ATTEMPTS:
                    if _pull_layer(link, offered, region, pool, layer, blocks):
                        layer, attempts = layer + 1, 0
                    else:
                        attempts += 1
                        reason = f"layer {layer} came {attempts} times with a wrong checksum"
                if layer == offered.last:
                    link.notify(msgspec.msgpack.encode(KvTaken(offered.request, offered.first, offered.last, offered.number)))
                    return pool.num_bytes(offered.last - offered.first, len(blocks))
            except PeerLost as error:
                reason, attempts = str(error), attempts + 1
                _close(link, stop)
                link = None
                time.sleep(_PAUSE_S)
    finally:
        _close(link, stop)
    raise TransferFailed(f"KV of request {offered.request}, layers {offered.first} to {offered.last - 1}: {reason}")


class Ledger:
    """A sender's account of offers that nobody has taken yet. From any thread.

    Args:
        free: told of the last of a request's offers that is taken: its blocks are the sender's again.
    """

    def __init__(self, free: Callable[[KvTaken], None]) -> None:
        self._free = free
        self._owed: dict[RequestId, set[KvTaken]] = {}
        self._lock = threading.Lock()

    def offered(self, request: RequestId, first: int, last: int, number: int = 0) -> None:
        with self._lock:
            self._owed.setdefault(request, set()).add(KvTaken(request, first, last, number))

    def on_notify(self, _node: str, payload: bytes) -> None:
        """For `Transport`: a receiver has spoken. What makes no sense, or comes twice, is passed over."""
        try:
            taken = msgspec.msgpack.decode(payload, type=KvTaken)
        except msgspec.DecodeError:
            return
        with self._lock:
            owed = self._owed.get(taken.request, set())
            if taken not in owed:
                return
            owed.remove(taken)
            if owed:
                return
            del self._owed[taken.request]
        self._free(taken)

    def withdraw(self, request: RequestId, number: int | None = None) -> bool:
        """The receiver of all offers of a request, or of offer `number`, will not come: whether any was still kept for it."""
        with self._lock:
            owed = self._owed.pop(request, set())
            if left := {offer for offer in owed if number is not None and offer.number != number}:
                self._owed[request] = left
            return len(left) < len(owed)


def _close(link: Link | None, stop: Stop) -> None:
    stop.watch(None)
    if link is not None:
        link.close()


def dial(
    transport: Transport, addresses: Sequence[str], region: str | None, fingerprint: str = "", into: Region | None = None
) -> Link:
    """A link by the first of a sender's addresses that answers, with `region` open; None where nothing is to be read.

    Raises:
        PeerLost: none does. PeerRefused: the sender has no such region, or one of another kind.
    """
    reason: PeerLost | ConfigError | None = None
    for address in addresses:
        try:
            link = transport.connect(address)
        except (PeerLost, ConfigError) as error:
            reason = error
            continue
        try:
            if region is not None:
                link.open(region, fingerprint, into)
        except BaseException:
            link.close()
            raise
        return link
    raise PeerLost(str(reason) if reason else "it has no address")


def _pull_layer(link: Link, offered: KvOffer, region: Region, pool: Pool, layer: int, blocks: Sequence[int]) -> bool:
    """Whether it matches its checksum."""
    here = pool.segments(layer, blocks)
    link.read(KV, offered.pool.segments(layer, offered.blocks), region, here)
    return region.digest(here) == offered.sums[layer - offered.first]
