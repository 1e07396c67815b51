"""The optimizers of a model by number, which is the same on all ranks and after a resume."""

from collections.abc import Callable, Sequence
from weakref import ref

from torch.optim import Optimizer


class KnownOptimizers:
    """The optimizers whose steps are exchanged.

    Args:
        fixed: Gives those that a Trainer knows, in its order. They have the first numbers.
    """

    def __init__(self, fixed: Callable[[], Sequence[Optimizer]] = tuple) -> None:
        self._fixed = fixed
        self._others: list[ref[Optimizer]] = []

    def all(self) -> list[Optimizer | None]:
        """All of them by number; None for one that the user has dropped."""
        fixed: list[Optimizer | None] = list(self._fixed())
        return fixed + self.others() if self._others else fixed

    def others(self) -> list[Optimizer | None]:
        """Those that a Trainer does not know."""
        return [one() for one in self._others]

    def has(self, optimizer: Optimizer) -> bool:
        """Whether this very one has a number."""
        return any(one is optimizer for one in self.all())

    def number_of(self, optimizer: Optimizer) -> int | None:
        """The number of an optimizer; None if it has none.

        An optimizer that wraps another one has the same number as that.
        """
        known = self.all()
        for number, one in enumerate(known):
            if one is optimizer:
                return number
        for number, one in enumerate(known):
            if one is not None and are_wrapped(one, optimizer):
                return number
        return None

    def add(self, optimizer: Optimizer) -> None:
        """Give an optimizer the next number."""
        self._others.append(ref(optimizer))

    def dropped(self) -> list[int]:
        """The numbers of those that the user has dropped."""
        return [number for number, one in enumerate(self.all()) if one is None]

    def exchange_numbers(self, dropped: int, successor: Optimizer) -> None:
        """Give an optimizer the number of one that was dropped."""
        place = dropped - len(self._fixed())
        own = [one() for one in self._others].index(successor)
        self._others[place], self._others[own] = self._others[own], self._others[place]


def are_wrapped(one: Optimizer, other: Optimizer) -> bool:
    """Whether one of two optimizers wraps the other, as SAM and Lookahead do.

    Then one is an attribute of the other, or they have a group of parameters in common: the object,
    not its contents.
    """
    if any(inner is other for inner in vars(one).values()):
        return True
    if any(inner is one for inner in vars(other).values()):
        return True
    groups = {id(group) for group in one.param_groups}
    return any(id(group) in groups for group in other.param_groups)
