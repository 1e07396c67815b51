"""Tries an optimizer on a few numbers, to learn how its step depends on gradients, weight decay and
other weights.

A miniature is the user's own optimizer, of its class and with its settings, whose parameters have
at most four entries along each dimension. It makes a few steps on them; nothing of the optimizer
itself changes. What it shows:

- Whether a step grows with its gradient. SGD's does, and then the plain mean of all ranks' steps is
  the step of DistributedDataParallel. Adam, Lion and Muon choose the length of their steps; the
  mean of such steps is too short.
- Which groups decay weights by ``1 - lr * weight_decay``, whatever the gradient (Loshchilov and
  Hutter, *Decoupled Weight Decay Regularization*, ICLR 2019).
- Whether it sets small weights to exactly zero, as a proximal step does (a soft threshold).
- Which values of its state grow with the square of gradients, and may be replaced by others of that
  size: Adam's ``exp_avg_sq``, Adagrad's ``sum``, the factors of Adafactor
  (:mod:`lightning_dct.sync.optimizer_state`).
- Whether another's change of a weight survives a step. It does not if the optimizer steps copies of
  its own.
- Whether a step calls a collective.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dct.compress.bucket_plan import local_of

# Entries along a dimension of a miniature's tensors.
WIDTH = 4
# Settings of optimizers whose memory of gradients fades, as those of torch name them; RMSprop has
# `alpha` and `eps`.
FADING = {"betas", "beta1", "beta2", "beta2_decay", "rho", "etas"}
WEIGHT = 0.0625
LEARNING_RATE = 0.015625
WEIGHT_DECAY = 0.25
# Gradients of real models are small. A step that divides by their size plus a much larger number
# grows with them.
GRADIENT = 2.0**-8
# Some optimizers begin otherwise than they go on: RAdam is linear for five steps.
STEPS = 8
# Between a step that stays as long and one that doubles when its gradient doubles.
GROWS = 2**0.5
# Share of a change that a step must leave; averaging optimizers take a part of it back.
SURVIVES = 0.25
PUSH = WEIGHT / 2
# With momentum, L2 regularisation looks like decay in the first step only.
DECAYING_STEPS = 3
# Times the smallest normal number: what steps leave of it is no zero.
TINY = 2.0**6
# What a loss scaler sets for the time of a fused optimizer's step.
OF_SCALER = {"found_inf", "grad_scale"}
# Relative error of a ratio of squares.
SQUARE = 0.02


class Trial(NamedTuple):
    """What a trial has shown.

    Attributes:
        is_scale_invariant: Whether steps do not grow with their gradients.
        decays: For each group, whether its weights decay by ``1 - lr * weight_decay``.
        sets_zeros: Whether a step sets small weights to exactly zero.
        squares: For each group, the keys of an optimizer's state whose values grow with the square
            of gradients. With each its memory: what a step with a gradient of zero leaves of them,
            as ``beta2``.
    """

    is_scale_invariant: bool = False
    decays: tuple[bool, ...] = ()
    sets_zeros: bool = False
    squares: tuple[dict[str, float], ...] = ()

    def squares_by_parameter(self, optimizer: Optimizer) -> dict[Tensor, dict[str, float]]:
        """The keys and memories of such values by parameter, of those that may have any."""
        groups = zip(optimizer.param_groups, self.squares, strict=False)
        return {parameter: keys for group, keys in groups if keys for parameter in group["params"]}


class _Refused(Exception):
    """An optimizer cannot train each rank's own weights; the message says why, and the remedy."""


def try_out(optimizer: Optimizer) -> Trial:
    """Try an optimizer; the result is the same on all ranks that have the same one.

    An optimizer that cannot be tried, such as one that needs a closure, counts as one whose steps
    grow.

    Raises:
        ValueError: It does not go with weights of the rank's own; the message has the remedy.
    """
    refuse(optimizer)
    kind = type(optimizer).__name__
    errors = []
    for keeps_state, is_sparse in product((False, True), (False, True)):
        try:
            return _tried(partial(_Miniature, optimizer, keeps_state, is_sparse))
        except _Refused as reason:
            raise ValueError(f"`{kind}` {reason}") from None
        except Exception as error:
            errors.append(error)
    rank_zero_info(
        f"`{kind}` cannot be tried on a few numbers ({type(errors[0]).__name__}:"
        f" {str(errors[0])[:100]}), so exchanges take the plain mean of its updates."
    )
    return Trial(False, (False,) * len(optimizer.param_groups))


def error_of_sparse_gradients(optimizer: Optimizer, weight_decay: float = 0.0) -> Exception | None:
    """What an optimizer with some weight decay raises where matrices have sparse gradients and not
    where they have dense ones, if anything.
    """
    errors: dict[bool, list[Exception]] = {False: [], True: []}
    for keeps_state, is_sparse in product((False, True), (False, True)):
        try:
            with (small := _Miniature(optimizer, keeps_state, is_sparse, weight_decay)):
                for parameter in small.parameters:
                    if parameter.dim() == 2:
                        small.set_gradient(parameter, torch.ones(parameter.shape))
                small.step()
        except Exception as error:
            errors[is_sparse].append(error)
    ways = 2  # with and without its state
    return errors[True][0] if len(errors[True]) == ways > len(errors[False]) else None


def warn_of_zeros(optimizer: Optimizer) -> None:
    """Warn of an optimizer that sets weights to exactly zero: shared weights, which move by means,
    have few zeros.
    """
    rank_zero_warn(
        f"`{type(optimizer).__name__}` sets small weights to exactly zero, as a proximal step does."
        " Ranks exchange what their weights have moved, above a threshold, so the shared weights"
        " have hardly any exact zeros. Use `compress='gradients'`, with which all ranks make the"
        " same step. Or set small weights to zero once, when training has ended."
    )


def loses_with_late_gradients(optimizer: Optimizer) -> bool:
    """Whether gradients that come late and in bursts cost quality: momentum, or a running size,
    remembers some.

    SGD without momentum remembers none, and Adagrad all.
    """
    groups: list[dict[str, Any]] = optimizer.param_groups
    return any(
        group.get("momentum") or group.keys() & FADING or {"alpha", "eps"} <= group.keys()
        for group in groups
    )


def warn_of_late_gradients(optimizer: Optimizer) -> None:
    """Warn of thresholded gradients under an optimizer that loses with them."""
    if loses_with_late_gradients(optimizer):
        rank_zero_warn(
            f"`compress='gradients'` loses quality under `{type(optimizer).__name__}`: what is"
            " below the threshold comes later and in bursts, which its momentum or its running"
            " size of gradients makes worse. Leave `compress` out: updates of weights are made for"
            " such optimizers. Or use density=1.0, or SGD without momentum, or Adagrad."
        )


def refuse(optimizer: Optimizer) -> None:
    """Refuse optimizers that are known not to go with weights of the rank's own (ValueError, with
    the remedy).
    """
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        raise ValueError(
            "`ZeroRedundancyOptimizer` needs the same weights on every rank in every step, and with"
            " `compress='updates'` each rank trains its own. Use `compress='gradients'`, or another"
            " optimizer."
        )
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "`LBFGS` compares the gradients of two steps as if nothing but the first step had moved"
            " the weights, and with `compress='updates'` exchanges move them too, so it may"
            " diverge. Use `compress='gradients', density=1.0`, or another optimizer."
        )


def _tried(miniature: Callable[..., "_Miniature"]) -> Trial:
    with (small := miniature()):  # the next ones do the same with other numbers
        moves = _last_move(small, 1.0, 0.0)
    small_of_larger = miniature()
    larger = _last_move(small_of_larger, 2.0, 0.0)
    pushed = _last_move(miniature(), 1.0, PUSH)
    moved = [index for index, move in enumerate(moves) if move.norm() > 0]
    if moved and all(
        (moves[index] - pushed[index]).mean() / PUSH > 1 - SURVIVES for index in moved
    ):
        raise _Refused(
            "steps copies of the weights and writes them into the model, which undoes every"
            " exchange. Use `compress='gradients'`, or an optimizer that steps the model's own"
            " weights."
        )
    grows = any(larger[index].norm() > GROWS * moves[index].norm() for index in moved)
    is_scale_invariant = bool(moved) and not grows
    squares = _squares(small, small_of_larger, miniature()) if is_scale_invariant else ()
    if any(squares) and not _may_be_replaced(miniature(), squares):
        squares = ({},) * len(squares)
    return Trial(
        is_scale_invariant,
        _decays(miniature(weight_decay=WEIGHT_DECAY)),
        _sets_zeros(miniature()),
        squares,
    )


def _squares(
    small: "_Miniature", larger: "_Miniature", fresh: "_Miniature"
) -> tuple[dict[str, float], ...]:
    """For each group, the keys of values that are four times as large if gradients are twice as
    large, and memories.
    """
    _last_move(fresh, 1.0, 0.0)
    before = _values_of(fresh)
    _last_move(fresh, 0.0, 0.0, steps=1)
    after = _values_of(fresh)
    found = []
    for number, (group, group_of_larger) in enumerate(
        zip(small.groups, larger.groups, strict=True)
    ):
        states = [small.state_of(parameter) for parameter in group["params"]]
        states_of_larger = [larger.state_of(parameter) for parameter in group_of_larger["params"]]
        keys = dict.fromkeys(key for state in states for key in state)
        squares = [key for key in keys if _are_squares(key, states, states_of_larger)]
        # Sums of half precision and fp32 are not exact.
        found.append(
            {key: round(min(after[number, key] / before[number, key], 1.0), 6) for key in squares}
        )
    return tuple(found)


def _values_of(small: "_Miniature") -> dict[tuple[int, Any], float]:
    """The sums of all values of a state, by group and key."""
    sums: defaultdict[tuple[int, Any], float] = defaultdict(float)
    for number, group in enumerate(small.groups):
        for parameter in group["params"]:
            for key, value in small.state_of(parameter).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    sums[number, key] += float(value.detach().double().sum())
    return sums


def _are_squares(key: Any, small: list[dict[Any, Any]], larger: list[dict[Any, Any]]) -> bool:
    """Whether a key's values of all parameters that have it are squares; there must be some other
    than zero.
    """
    pairs = [
        (one[key], other[key])
        for one, other in zip(small, larger, strict=True)
        if key in one and key in other
    ]
    if not isinstance(key, str) or not all(
        isinstance(value, Tensor) for pair in pairs for value in pair
    ):
        return False
    if not all(one.is_floating_point() for one, _ in pairs) or not any(
        bool(one.any()) for one, _ in pairs
    ):
        return False
    for one, other in pairs:
        expected = 4.0 * one.detach().double()
        is_square = torch.allclose(other.detach().double(), expected, rtol=SQUARE, atol=0.0)
        if not is_square or bool((one < 0).any()):
            return False
    return True


def _may_be_replaced(small: "_Miniature", squares: Sequence[Mapping[str, float]]) -> bool:
    """Whether steps stay finite after such values became smaller, as a mean over ranks may be;
    zeros are the least.

    They do not if the optimizer subtracts the square of another value, as RMSprop does to centre
    them.
    """
    _last_move(small, 1.0, 0.0)
    for group, keys in zip(small.groups, squares, strict=True):
        for parameter in group["params"]:
            state = small.state_of(parameter)
            for key in state.keys() & set(keys):
                state[key].zero_()
    return all(bool(move.isfinite().all()) for move in _last_move(small, 1.0, 0.0, steps=1))


def _last_move(
    small: "_Miniature", gradient: float, push: float, steps: int = STEPS
) -> list[Tensor]:
    """The last of a few steps of a miniature, by parameter; before it, ``push`` is added to the
    weights.
    """
    numbers = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=small.gpus):
        for step in range(1, steps + 1):
            for parameter in small.parameters:
                # Its square is 0 in half precision.
                scale = GRADIENT if parameter.dtype.itemsize > 2 else 1.0
                small.set_gradient(
                    parameter,
                    torch.randn(parameter.shape, generator=numbers).mul_(scale * gradient),
                )
                parameter.data.add_(push if step == steps else 0.0)
            before = [parameter.detach().clone() for parameter in small.parameters]
            small.step()
        return [
            (p.detach() - old).real.float().cpu()
            for p, old in zip(small.parameters, before, strict=True)
        ]


def _decays(small: "_Miniature") -> tuple[bool, ...]:
    """Whether zero gradients shrink each group's weights by ``1 - lr * weight_decay`` in each
    step.
    """
    left = WEIGHT * (1 - LEARNING_RATE * WEIGHT_DECAY) ** DECAYING_STEPS

    def decayed(weights: Tensor) -> bool:
        # Three steps decay weights by 0.012; numbers of half precision are 0.004 and 0.0005 apart
        # there.
        return bool(
            (
                (weights.detach() - left).abs()
                <= left * (1e-5 if weights.dtype.itemsize > 2 else 3e-3)
            ).all()
        )

    with torch.random.fork_rng(devices=small.gpus), small:
        for _ in range(DECAYING_STEPS):
            for parameter in small.parameters:
                small.set_gradient(parameter, torch.zeros(parameter.shape))
            small.step()
        return tuple(
            bool(group["params"])
            and {"lr", "weight_decay"} <= group.keys()
            and all(map(decayed, group["params"]))
            for group in small.groups
        )


def _sets_zeros(small: "_Miniature") -> bool:
    """Whether steps with zero gradients turn tiny weights into zeros: decay makes them smaller, and
    no zeros.
    """
    with torch.random.fork_rng(devices=small.gpus), small:
        for parameter in small.parameters:
            parameter.data.fill_(TINY * torch.finfo(parameter.dtype).tiny)
        for _ in range(DECAYING_STEPS):
            for parameter in small.parameters:
                small.set_gradient(parameter, torch.zeros(parameter.shape))
            small.step()
        return any(bool((parameter.detach() == 0).any()) for parameter in small.parameters)


class _Miniature(TorchDispatchMode):
    """A small copy of an optimizer. Within the context, writes reach nothing that was there before.

    Args:
        optimizer: Stays as it is.
        keeps_state: Begin with zeros for its state, instead of no state. Adagrad makes its state
            when it is made.
        is_sparse: Give parameters sparse gradients.
        weight_decay: What all groups that have this setting are given.
    """

    def __init__(
        self, optimizer: Optimizer, keeps_state: bool, is_sparse: bool, weight_decay: float = 0.0
    ) -> None:
        super().__init__()
        self._keeps_state = keeps_state
        self._is_sparse = is_sparse
        self._weight_decay = weight_decay
        self._copies: dict[int, Any] = {}
        self._made: dict[int, Any] = {}
        # With tensors outside its state an optimizer may go through them and its parameters side by
        # side.
        besides = {
            name: value
            for name, value in vars(optimizer).items()
            if name not in {"param_groups", "state", *OF_SCALER}
        }
        self._all = any(True for _ in _tensors_in(besides))
        self._optimizer = self._copy(optimizer)
        self.groups: list[dict[str, Any]] = self._optimizer.param_groups
        self.parameters: list[Tensor] = list(
            {id(p): p for group in self.groups for p in group["params"]}.values()
        )
        self.gpus = {p.device.index for p in self.parameters if p.device.type == "cuda"}

    def step(self) -> None:
        """Make a step, without the hooks and wrappers of the optimizer itself."""
        type(self._optimizer).step(self._optimizer)

    def state_of(self, parameter: Tensor) -> dict[Any, Any]:
        """The state of one of its parameters."""
        return self._optimizer.state.get(parameter, {})

    def set_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Give a parameter a gradient (shape and values of ``gradient``), sparse where real ones
        are.
        """
        gradient = gradient.to(parameter.device, parameter.dtype)
        parameter.grad = gradient.to_sparse(1) if self._is_sparse else gradient

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse collectives, and writes into tensors that this miniature has not made."""
        if "c10d" in func.namespace:
            raise _Refused(
                f"calls the collective `{func.name().partition('::')[2]}` in its step. It needs the"
                " same weights on every rank, and with `compress='updates'` each rank trains its"
                " own. Use `compress='gradients'`, or another optimizer."
            )
        if func._schema.is_mutable:
            arguments = func._schema.arguments
            given = {one.name: value for one, value in zip(arguments, args, strict=False)} | (
                kwargs or {}
            )
            written = [
                given.get(one.name)
                for one in arguments
                if one.alias_info and one.alias_info.is_write
            ]
            for tensor in _tensors_in(written):
                if (
                    tensor.layout == torch.strided
                    and tensor.untyped_storage()._cdata not in self._made
                ):
                    raise RuntimeError(
                        f"{func.name()} writes into a tensor that the state does not list"
                    )
        made = func(*args, **(kwargs or {}))
        for tensor in _tensors_in(made):
            self._note(tensor)
        return made

    def _note(self, tensor: Tensor) -> None:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            self._made[storage._cdata] = storage  # kept, so that no other one takes its place

    def _copy(self, value: Any) -> Any:
        """A small copy of a part of the optimizer; the same part has the same copy."""
        if id(value) not in self._copies:
            self._copies[id(value)] = self._make(value)
        return self._copies[id(value)]

    def _make(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._cut(value)
        if isinstance(value, Optimizer):
            return self._make_optimizer(value)
        if isinstance(value, defaultdict):
            return defaultdict(
                value.default_factory, {key: self._copy(one) for key, one in value.items()}
            )
        if isinstance(value, dict):
            return {key: self._copy(one) for key, one in value.items()}
        if isinstance(value, (list, set)) or type(value) is tuple:
            return type(value)(self._copy(one) for one in value)
        return value

    def _make_optimizer(self, optimizer: Optimizer) -> Optimizer:
        copy = self._copies[id(optimizer)] = object.__new__(type(optimizer))
        # Schedulers wrap its step.
        left_out = {"step", *OF_SCALER}
        parts = {name: value for name, value in vars(optimizer).items() if name not in left_out}
        for name, value in parts.items():
            is_hooks = name.startswith("_optimizer_") and isinstance(value, dict)
            if name == "param_groups":
                vars(copy)[name] = self._copies[id(value)] = [self._group(group) for group in value]
            elif name == "state":
                vars(copy)[name] = self._copies[id(value)] = self._state(value)
            else:
                vars(copy)[name] = type(value)() if is_hooks else self._copy(value)
        return copy

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        if id(group) in self._copies:
            return self._copies[id(group)]
        first = {(p.dim(), p.dtype): p for p in reversed(group["params"]) if p.numel()}
        params = [
            self._copy(p) for p in (group["params"] if self._all else reversed(first.values()))
        ]
        small = {name: self._copy(value) for name, value in group.items() if name != "params"} | {
            "params": params
        }
        for name, value in (("lr", LEARNING_RATE), ("weight_decay", self._weight_decay)):
            if isinstance(small.get(name), Tensor):
                small[name].fill_(value)
            elif isinstance(small.get(name), float | int):
                small[name] = value
        self._copies[id(group)] = small
        return small

    def _state(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        small: defaultdict[Any, Any] = defaultdict(dict)
        for parameter, own in state.items() if self._keeps_state else ():
            if id(parameter) in self._copies:
                copy = self._copy(own)
                for tensor in _tensors_in(copy):
                    tensor.zero_()
                small[self._copies[id(parameter)]] = copy
        return small

    def _cut(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, Parameter):
            # Of its whole shape, which all ranks have alike, even if a rank has no rows of it.
            shape = [min(size, WIDTH) for size in tensor.shape]
            cut: Tensor = Parameter(local_of(tensor.detach()).new_full(shape, WEIGHT))
        else:
            whole = local_of(tensor.detach())
            cut = whole[tuple(slice(0, WIDTH) for _ in whole.shape)].clone()
        self._note(cut)
        return cut


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors_in(one)
    elif isinstance(value, (list, tuple, set)):
        for one in value:
            yield from _tensors_in(one)
