"""The user's function that keeps weights within bounds, and a look at whether it is a
projection.
"""

import math
from collections.abc import Callable

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn import Module

from lightning_dct.compress.bucket_plan import local_of

# Of what a function has moved, the share that a second call may move: rounding, and no more.
AGAIN = 0.1


class Projection:
    """Calls a function of a module that brings its weights back into their bounds, and warns if it
    is no projection.

    It is called for two sets of weights, after each step. So what lies within the bounds must stay
    as it is: calling it twice must do what calling it once does. A soft threshold, or a decay,
    moves weights each time.

    The function is looked at in calls 1, 2, 4, 8 ... until one of them has moved weights.
    """

    def __init__(self, function: Callable[[Module], None], module: Module) -> None:
        self._function = function
        self._module = module
        self._calls = 0
        self._is_known = False

    def __call__(self) -> None:
        """Bring the weights that are in the module back into their bounds."""
        self._calls += 1
        is_looked_at = not self._is_known and self._calls & (self._calls - 1) == 0
        before = self._weights() if is_looked_at else []
        self._function(self._module)
        if is_looked_at:
            self._look(before)

    def _look(self, before: list[Tensor]) -> None:
        once = self._weights()
        moved = _distance(once, before)
        if moved == 0.0:
            return
        self._is_known = True
        self._function(self._module)
        again = _distance(self._weights(), once)
        for parameter, weights in zip(self._parameters(), once, strict=True):
            parameter.copy_(weights)
        if again > AGAIN * moved:
            rank_zero_warn(
                "`project` is no projection: called once more, it moves the weights again"
                f" ({again / moved:.2g} of what it has moved before). It is called for this rank's"
                " own weights and for the shared ones, after each step, so what it does each time,"
                " as a soft threshold or a decay does, counts more than once. Give a function that"
                " leaves weights within their bounds as they are, such as a clamp. For a proximal"
                " step use `compress='gradients'`, with the function in the optimizer's `step`."
            )

    def _parameters(self) -> list[Tensor]:
        return [local_of(parameter.detach()) for parameter in self._module.parameters()]

    def _weights(self) -> list[Tensor]:
        return [parameter.clone() for parameter in self._parameters()]


def _distance(these: list[Tensor], those: list[Tensor]) -> float:
    moved = [
        float((one - other).abs().float().norm()) for one, other in zip(these, those, strict=True)
    ]
    return math.hypot(*(distance for distance in moved if math.isfinite(distance)))
