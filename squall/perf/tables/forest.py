"""Operator times from a random forest over measured rows, as Vidur predicts them, with two of its troubles put right.

The forest (scikit-learn, extra `forest`) learns what a time is in proportion to the operator's trend. So it is not flat beyond
the rows: there the trend goes on. Its interval comes from the trees that have not seen a row. Trees are walked here, one query
at a time; scikit-learn is needed to train only.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from squall.errors import ProfileError
from squall.extras import install
from squall.perf.operators import Estimate, Provenance
from squall.perf.tables.operations import Array
from squall.perf.tables.spread import CONFIDENCE
from squall.perf.tables.table import Curve

_TREES = 30
_SEED = 0
_LEAF = 2
"""Rows of a leaf, at least."""

_Tree = tuple[list[int], list[int], list[int], list[float], list[float]]
"""Children on the left and on the right (-1 at a leaf), the feature and its threshold, the value."""


class ForestCurve(Curve):
    """Rows of one kind, and a forest of them."""

    @cached_property
    def forest(self) -> tuple[list[_Tree], float]:
        """The trees, and the spread."""
        points = self.points
        features = np.array([self._features(sizes) for sizes, _ in points])
        target = np.log([seconds for _, seconds in points]) - features[:, -1]
        model = _regressor()
        model.fit(features, target)
        errors = np.abs(model.oob_prediction_ - target)
        return [_walkable(tree.tree_) for tree in model.estimators_], float(np.expm1(np.quantile(errors, CONFIDENCE)))

    @cached_property
    def ranges(self) -> tuple[Array, Array]:
        """The least and the largest value of each size."""
        sizes = np.array([sizes for sizes, _ in self.points])
        return sizes.min(axis=0), sizes.max(axis=0)

    def estimate(self, sizes: Sequence[float]) -> Estimate:
        """See `Curve.estimate`; nothing counts as measured, since a forest does not return what was."""
        trees, spread = self.forest
        features = self._features(sizes)
        share = sum(_walk(tree, features) for tree in trees) / len(trees)
        low, high = self.ranges
        inside = bool(np.all(low <= sizes) and np.all(sizes <= high))
        provenance = Provenance.INTERPOLATED if inside else Provenance.EXTRAPOLATED
        return Estimate(float(np.exp(share + features[-1])), provenance, spread if inside else 2 * spread + 0.1)

    def _features(self, sizes: Sequence[float]) -> list[float]:
        trend = self.trend.seconds(self.at(sizes))
        return [*np.log1p(sizes).tolist(), float(np.log(trend))]


def _regressor() -> Any:
    try:
        from sklearn.ensemble import RandomForestRegressor
    except ModuleNotFoundError:
        raise ProfileError(f'latency.kind = "forest" needs scikit-learn: {install("forest")}') from None
    return RandomForestRegressor(_TREES, min_samples_leaf=_LEAF, max_features=1.0, oob_score=True, random_state=_SEED)


def _walkable(tree: Any) -> _Tree:
    return (
        tree.children_left.tolist(), tree.children_right.tolist(), tree.feature.tolist(), tree.threshold.tolist(),
        tree.value[:, 0, 0].tolist(),
    )  # fmt: skip


def _walk(tree: _Tree, features: Sequence[float]) -> float:
    left, right, feature, threshold, value = tree
    node = 0
    while left[node] >= 0:
        node = left[node] if features[feature[node]] <= threshold[node] else right[node]
    return value[node]
