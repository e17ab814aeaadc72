"""The weights of one session: wanted, on their way, layer by layer here, or not to come. Knows no request and no machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from squall.core.actions import LoadWeights
from squall.core.events import Event, LayerArrived, LoadFailed, WeightsLoaded
from squall.errors import SquallError
from squall.live.errands import Errands
from squall.live.host import Host
from squall.live.loading import Order
from squall.live.rpc.convert import Peer, WeightsMoved

_log = logging.getLogger(__name__)


class Arrival:
    """What a session wants of its replica's loads, and hears of them; see `Told`.

    Args:
        host: whose weights.
        errands: of the session.
        settled: see `Open` in squall.proto.
        tell: the controller.
        moved: is called with how the weights came, before the controller hears that they are here.
    """

    def __init__(
        self, host: Host, errands: Errands, settled: bool, tell: Callable[[Event], None], moved: Callable[[WeightsMoved], None]
    ) -> None:
        self._host = host
        self._errands = errands
        self._settled = settled
        self._tell = tell
        self._moved = moved
        self._num_told = 0  # layers that the head knows of
        self._over = False  # the weights are here, or will not come

    def prepare(self) -> None:
        """The engine is to work while they arrive."""
        self._errands.run(self._host.way.prepare, None, self._failed)

    def order(self, action: LoadWeights, peers: Sequence[Peer]) -> None:
        """Again while they are on their way: go on as this order says. One that crossed with their end is void."""
        if not self._over:
            order = Order(action.replica, action.transfer, {peer.replica: peer.addresses for peer in peers}, self._settled)
            self._errands.run(self._host.way.prepare, lambda _: self._host.loads.order(order, self), self._failed)

    # -- in a load's threads

    def arrived(self, num_layers: int) -> None:
        self._errands.on_loop(self._arrived, num_layers)

    def loaded(self, moved: WeightsMoved) -> None:
        self._errands.on_loop(self._loaded, moved)

    def load_failed(self, error: Exception) -> None:
        self._errands.on_loop(self._failed, error)

    # -- on the session's loop

    def _arrived(self, count: int) -> None:
        """A replica's layers are told of once each, in order, however often its load was begun anew."""
        for layer in range(self._num_told, count):
            self._tell(LayerArrived(self._host.replica, layer))
        self._num_told = max(self._num_told, count)

    def _loaded(self, moved: WeightsMoved) -> None:
        if self._over:  # an order that crossed with their end has found them here
            return
        self._over = True
        self._moved(moved)
        self._tell(WeightsLoaded(self._host.replica, self._host.engine.num_blocks, self._host.engine.block_size))

    def _failed(self, error: BaseException) -> None:
        if self._over:
            return
        self._over = True
        if not isinstance(error, SquallError):
            _log.error("weights did not come", exc_info=error)
        self._tell(LoadFailed(self._host.replica, one_line(error)))


def one_line(error: BaseException) -> str:
    """What a person is told of it."""
    text = " ".join(str(error).split())
    return text if isinstance(error, SquallError) else f"{type(error).__name__}: {text}"
