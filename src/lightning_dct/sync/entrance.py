"""The entrance of an optimizer's step, for the Trainer, Fabric and plain loops alike.

    hooks before and after the steps of all optimizers   see each step, whoever makes it
    a strategy's `optimizer_step`                        sees steps that a loss scaler skips, and
                                                         those of optimizers that have no hooks
    StepEntrance                                         the outermost step counts
    UpdateSynchronizer                                   begin_step, average_gradients, after_step

A step that begins within another one is a part of it if it moves no other parameters: that of an
optimizer inside a wrapper, such as Lookahead or SAM, or of the base of its class. A wrapper and
what it wraps have one clock, whichever of them is stepped.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim import optimizer as torchs
from torch.utils.hooks import RemovableHandle

from lightning_dct.agreement import check_agreement, describe_optimizers, gather_objects
from lightning_dct.step_hooks import see_steps
from lightning_dct.sync.optimizer_clock import are_wrapped
from lightning_dct.sync.updates import UpdateSynchronizer
from lightning_dct.sync.views import View

# Entrances live as long as an optimizer that they follow.
_kept: weakref.WeakKeyDictionary[Optimizer, list["StepEntrance"]] = weakref.WeakKeyDictionary()
_watching: weakref.WeakSet["StepEntrance"] = weakref.WeakSet()


@dataclass(eq=False)
class _Step:
    """A step that has begun.

    Attributes:
        optimizer: Whose step it is.
        is_call: Whether a strategy's method makes it, which says when it ends.
        parts: The optimizers that have begun a step within it; itself, if its class or the method
            calls its step.
        is_made: Whether it has changed weights; a loss scaler may skip it.
        is_seen: Whether a hook has seen it begin.
    """

    optimizer: Optimizer
    is_call: bool
    parts: list[Optimizer] = field(default_factory=list)
    is_made: bool = False
    is_seen: bool = False

    def contains(self, optimizer: Optimizer) -> bool:
        """Whether a step of an optimizer within this one moves nothing else."""
        if optimizer is self.optimizer or are_wrapped(optimizer, self.optimizer):
            return True
        return set(_stepped_by(self.optimizer)).issuperset(_stepped_by(optimizer))


class StepEntrance:
    """Has a model's updates exchanged after the steps of all optimizers that step its parameters.

    An optimizer that is not known takes part from its first step on, which all ranks begin.

    Args:
        updates: The synchronizer of the model.
    """

    def __init__(self, updates: UpdateSynchronizer) -> None:
        self.updates = updates
        # From the outermost to the innermost.
        self._steps: list[_Step] = []
        # Those whose first step all ranks have begun together.
        self._agreed: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # Those that step no parameter of the model.
        self._strangers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # Whether new optimizers are its own, and not those of a later one for the same model.
        self._takes_new = True
        self._handles: list[RemovableHandle] = []

    def watch(self) -> None:
        """See all steps of this process from now on."""
        own = self.updates.parameter_names.keys()
        for other in _watching:
            if not own.isdisjoint(other.updates.parameter_names):
                other._takes_new = False
        _watching.add(self)
        self._handles = see_steps(self, self._before, self._after)

    def stop(self) -> None:
        """See no more of them."""
        while self._handles:
            self._handles.pop().remove()
        _watching.discard(self)
        for entrances in _kept.values():
            entrances[:] = [one for one in entrances if one is not self]

    def follow(self, optimizer: Optimizer, is_agreed: bool = False) -> None:
        """Give an optimizer a number, on all ranks alike.

        Args:
            optimizer: Its steps count from now on.
            is_agreed: Whether it is one of the first, which takes no dropped one's place.
        """
        self.updates.known.add(optimizer)
        _kept.setdefault(optimizer, []).append(self)
        if is_agreed:
            self._agreed.add(optimizer)

    def begin(self, optimizer: Optimizer, is_call: bool = False) -> _Step | None:
        """Begin a step; None if it is a part of another one, or none of this model's."""
        if self._steps:
            # A step that has failed has begun and never ends.
            own = 0 if is_call else 1
            self._steps = [
                one
                for one in self._steps
                if one.is_call or _depth(one.optimizer) > own * (one.optimizer is optimizer)
            ]
        for step in self._steps:
            if step.contains(optimizer):
                step.parts.append(optimizer)
                return None
        if not self._counts(optimizer, is_call):
            return None
        if optimizer not in self._agreed:
            self._begin_first_step(optimizer)
        self.updates.begin_step(optimizer)
        step = _Step(optimizer, is_call)
        self._steps.append(step)
        return step

    def end(self, step: _Step | None) -> None:
        """End a step that has begun."""
        if step is not None:
            self.drop(step)
            # A step of an optimizer without hooks is seen only if a scaler cannot have skipped it.
            is_made = step.is_made or (step.is_call and not self.updates.may_skip)
            self.updates.after_step(step.optimizer, is_made)

    def drop(self, step: _Step | None) -> None:
        """Forget a step that has failed."""
        self._steps = [one for one in self._steps if one is not step]

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.begin(optimizer)
        step = next((one for one in self._steps if one.contains(optimizer)), None)
        if step is None or step.is_seen:
            return None
        step.is_seen = True
        if not self.updates.averages_gradients(step.optimizer):
            return None
        # A closure makes the gradients, within the step.
        return _with_closure(args, kwargs, partial(self.updates.average_gradients, step.optimizer))

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        is_made = not is_skipped(optimizer)
        ended = None
        for step in self._steps:
            if step.optimizer is optimizer or optimizer in step.parts:
                step.is_made |= is_made
            if step.optimizer is optimizer and not step.is_call:
                ended = step
        if ended is None:
            return
        # A class whose step calls that of its base has two of them with hooks.
        if optimizer not in ended.parts or _depth(optimizer) <= 1:
            # A scaler tells fused optimizers to skip a step, and calls no step of others.
            self.updates.may_skip |= hasattr(optimizer, "found_inf")
            self.end(ended)

    def _counts(self, optimizer: Optimizer, is_call: bool) -> bool:
        """Whether a step that is no part of another one is exchanged."""
        if is_call:
            return True
        views = self.updates.views
        # What is written into shared weights while they are shown is taken over.
        if View.EVALUATION in views or View.END in views:
            return False
        if self.updates.known.number_of(optimizer) is not None:
            return True
        if not self._takes_new or views.are_open:
            return False
        names = self.updates.parameter_names
        if any(one in names and one.requires_grad for one in _stepped_by(optimizer)):
            return True
        if optimizer not in self._strangers:
            self._strangers.add(optimizer)
            self.updates.refuse_late(_stepped_by(optimizer))
        return False

    def _begin_first_step(self, optimizer: Optimizer) -> None:
        """Have all ranks begin the first step of an optimizer, if that may differ between them."""
        self._agreed.add(optimizer)
        updates = self.updates
        known = updates.known
        what = "the first step of an optimizer"
        if known.number_of(optimizer) is None and updates.takes_new_optimizers:
            kind = type(optimizer).__name__
            updates.check_order(what, f"the first step of a new `{kind}`")
            described = describe_optimizers([optimizer], updates.parameter_names)
            check_agreement(described, Module(), updates.group)
            self.follow(optimizer)
            self._take_number_of_dropped(optimizer)
            rank_zero_info(
                f"The steps of another optimizer, a new `{kind}`, are exchanged from now on."
            )
        elif len(known.others()) > 1 and known.has(optimizer):
            updates.check_order(what, what)
            self._take_number_of_dropped(optimizer)

    def _take_number_of_dropped(self, successor: Optimizer) -> None:
        """Give an optimizer the number of one that the user has dropped on every rank, if any; a
        collective call.
        """
        known = self.updates.known
        # Ranks may collect garbage at different times.
        everyone = gather_objects(known.dropped(), self.updates.group)
        if everywhere := set.intersection(*map(set, everyone)):
            number = min(everywhere)
            self.updates.forget_optimizer(number)
            known.exchange_numbers(number, successor)


@contextmanager
def calls_step(optimizer: Optimizer, entrances: Iterable[StepEntrance]) -> Iterator[None]:
    """Have a strategy's method make a step within the context; exchange updates when it ends."""
    begun: list[tuple[StepEntrance, _Step | None]] = []
    try:
        for entrance in entrances:
            begun.append((entrance, entrance.begin(optimizer, is_call=True)))
        yield
    except BaseException:
        for entrance, step in begun:
            entrance.drop(step)
        raise
    for entrance, step in begun:
        entrance.end(step)


def _with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], then: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a step, the optimizer first, with a closure that calls a function at its
    end; without a closure it is called now.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        then()
        return args, kwargs

    def with_means(*given: Any) -> Any:
        result = closure(*given)
        then()
        return result

    return (args[0], *args[2:]), {**kwargs, "closure": with_means}


def is_skipped(optimizer: Optimizer) -> bool:
    """Whether a step that is called changes nothing, because of infinite gradients: fused ones are
    told by a scaler.
    """
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def _stepped_by(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _depth(optimizer: Optimizer) -> int:
    """The number of calls of an optimizer's step that are being executed and have hooks."""
    found = 0
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == torchs.__file__ and frame.f_locals.get("self") is optimizer:
            found += 1
        frame = frame.f_back  # type: ignore[assignment]
    return found
