"""The integer program with which BlitzScale's authors choose the splits of live scaling; a yardstick, solved by SciPy's HiGHS.

Needs `scipy`, which nothing else here does. The program (OSDI 2025, section 5.3) splits the L layers of each of N equal
batches into T_i for the target and S_i for the source, and minimises the mean of the source's running sum of S_i, subject to

    S_i + T_i = L
    sum of T_j for j <= i   <=  sum of S_j for j < i                                 (i > 1)
    time_l * T_i            <=  sum of T_j for j < i  +  (N - i + 1) * (T_i - 1)     (i > 1)

with time_l the time in which a layer arrives, in units of the time in which one is computed. Its text leaves two things open:

- *When the clock starts.* As printed, no early batch could be given any layer at all (T_i = 1 would need time_l units of
  earlier work, T_i = 0 would need N - i + 1). Here it starts when the first layer is in, as in `sim.zigzag`: layer T_i is there
  after time_l * (T_i - 1), which makes T_i = 1 always possible.
- *The first batch*, which no constraint binds. Here T_1 = 1: the source begins when the target has run the one layer that it has.

It is no lower bound of the discrete model: there the target may also finish a batch while the source works on another, and may
take layers in another order than the load constraint supposes.
"""

from squall.errors import ConfigError
from squall.extras import install
from squall.sim.zigzag import Schedule


def paper_ilp(num_batches: int, num_layers: int, every: int) -> Schedule:
    """The program's own answer: the splits, and the ends that it counts on (the first layer, then the source without a pause).

    Raises:
        ConfigError: scipy is not installed, or there is no solution.
    """
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError:
        raise ConfigError(f"the paper's ILP needs scipy: {install('ilp')}") from None
    n, layers = num_batches, num_layers
    # T is unknown; S = L - T. The mean of running sums of S falls by (n - i) / n with every layer that batch i (from 0) has in T.
    price = np.array([-(n - i) / n for i in range(n)])
    rows, at_most = [], []
    for i in range(1, n):
        # sum_{j<=i} T_j <= i * L - sum_{j<i} T_j
        rows.append([2.0] * i + [1.0] + [0.0] * (n - i - 1))
        at_most.append(float(i * layers))
        # every * (T_i - 1) - sum_{j<i} T_j - (n - i) * (T_i - 1) <= 0
        speed = float(every - (n - i))
        rows.append([-1.0] * i + [speed] + [0.0] * (n - i - 1))
        at_most.append(speed)
    upper = np.full(n, float(layers))
    upper[0] = 1.0
    found = milp(
        price,
        constraints=LinearConstraint(np.array(rows), ub=np.array(at_most)) if rows else None,
        integrality=np.ones(n),
        bounds=Bounds(np.ones(n), upper),
    )
    if not found.success:
        raise ConfigError(
            f"the paper's ILP has no solution for {n} batches of {layers} layers, one every {every}: {found.message}"
        )
    targets = [round(float(had)) for had in found.x]
    splits = tuple((had, layers - had) for had in targets)
    ends, now = [], splits[0][0]
    for _, left in splits:
        now += left
        ends.append(now)
    return Schedule(tuple(ends), splits)
