"""The settings of gradient compression: one frozen dataclass, checked once, when it is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from inspect import Parameter, signature
from numbers import Integral
from typing import Any, Literal, get_args

from lightning_dct.kernels import KERNELS, KernelName

ValueFormat = Literal["fp32", "bf16", "int8", "int4", "1bit"]
VALUE_FORMATS: tuple[str, ...] = get_args(ValueFormat)
ExchangeName = Literal["auto", "all_gather", "sharded", "by_node"]
EXCHANGES: tuple[str, ...] = get_args(ExchangeName)
MissingState = Literal["error", "reset"]
Compress = Literal["updates", "gradients"]
# Settings that say nothing where gradients are exchanged.
OF_UPDATES = ("local_steps", "delay", "warmup_steps", "residual_decay")


@dataclass(frozen=True)
class DCTConfig:
    """What is sent, how it is written, and when the thresholds are selected anew.

    Attributes:
        compress: What is exchanged: ``"updates"``, what weights have moved since the last exchange, behind an optimizer
            that trains on this rank's own gradients; or ``"gradients"``, in every backward, as the paper does. With
            Adam or momentum the latter loses quality: a residual delays gradients and lets them arrive in bursts.
        local_steps: Optimizer steps from one exchange of updates to the next, at least 1; 8 unless given. Gradients
            are exchanged in every step.
        warmup_steps: Optimizer steps in which updates are exchanged up to eight times as often, and each exchange sends
            as much less, unless a density is 1: weights of different ranks must not drift apart while they move fast.
        residual_decay: What remains of an update's residual after each exchange of the warm-up, in (0, 1]. Less than 1
            draws the ranks together, for learning rates that the batch of one rank alone cannot bear. After the
            warm-up nothing is forgotten.
        delay: Optimizer steps that an exchange of updates may travel while training goes on, at most ``local_steps``.
            With 0 training waits for it. From 1 on tensors take turns, so that the link is never in a burst.
        density: Share of each tensor's entries that an exchange sends, in (0, 1]. 1.0 sends everything, as plain DDP
            does.
        density_per_parameter: Densities for some parameters, by name pattern (``fnmatch`` wildcards, as in
            ``{"*.embedding.weight": 0.001}``). The first pattern that matches a name wins. A pattern that matches
            no parameter is an error.
        refresh_every: Optimizer steps between two exact selections of the thresholds.
        value_format: How a sent entry is written: ``"fp32"``, ``"bf16"``, ``"int8"`` or ``"int4"`` (one scale a
            tensor) or ``"1bit"`` (its sign, times the mean magnitude of what the tensor sends). What rounding loses
            stays in the residual. Of gradients with a density of 1 ``"bf16"`` is the dtype in which they are averaged.
        min_tensor_size: Tensors with fewer entries than this are sent whole, in their own dtype.
        guard: Nudge each threshold between refreshes so that the number of entries above it stays near its target.
        exchange: How payloads get to the other ranks: ``"all_gather"`` (to all of them), ``"sharded"`` (to the owner of
            each piece of the model, who sums, thresholds again and passes on), ``"by_node"`` (dense inside a node,
            compressed between nodes) or ``"auto"``, which chooses by counted bytes and says what it chose.
        kernel: What adds, compares and compacts: ``"torch"``, ``"numba"`` (on the CPU), ``"triton"`` (on CUDA) or
            ``"auto"``, the fastest that is installed. All of them give the same to the last bit.
        missing_state: What happens when a run resumes from a checkpoint and the folder that was saved beside it is not
            there: ``"error"``, or ``"reset"``, which goes on with nothing held back and says so. Rows of sharded tables
            are part of the model; without them it is always an error.
    """

    compress: Compress = "updates"
    local_steps: int | None = None
    warmup_steps: int = 320
    residual_decay: float = 0.95
    delay: int = 0
    density: float = 0.3
    density_per_parameter: Mapping[str, float] = field(default_factory=dict)
    refresh_every: int = 1000
    value_format: ValueFormat = "1bit"
    min_tensor_size: int = 16
    guard: bool = True
    exchange: ExchangeName = "auto"
    kernel: KernelName = "auto"
    missing_state: MissingState = "error"

    def __post_init__(self) -> None:
        check_density("density", self.density)
        if not isinstance(self.density_per_parameter, Mapping):
            raise TypeError(
                "`density_per_parameter` must map parameter-name patterns to densities, as in"
                f" {{'*.embedding.weight': 0.001}}; got {self.density_per_parameter!r}."
            )
        for pattern, density in self.density_per_parameter.items():
            check_density(f"density_per_parameter[{pattern!r}]", density)
        # A private plain dict: a caller's later change must not reach a running job, and Hydra's own mapping types
        # must not reach a checkpoint or another process.
        object.__setattr__(
            self,
            "density_per_parameter",
            {str(pattern): float(density) for pattern, density in self.density_per_parameter.items()},
        )
        self._check_rounds()
        check_integer("refresh_every", self.refresh_every, minimum=1)
        check_integer("min_tensor_size", self.min_tensor_size, minimum=0)
        check_choice("value_format", self.value_format, VALUE_FORMATS)
        check_choice("exchange", self.exchange, EXCHANGES)
        check_choice("kernel", self.kernel, KERNELS)
        check_choice("missing_state", self.missing_state, get_args(MissingState))
        if not isinstance(self.guard, bool):
            raise TypeError(f"`guard` must be True or False, got {self.guard!r}.")

    def _check_rounds(self) -> None:
        check_choice("compress", self.compress, get_args(Compress))
        updates = self.compress == "updates"
        if self.local_steps is None:
            object.__setattr__(self, "local_steps", 8 if updates else 1)
        check_integer("local_steps", self.local_steps, minimum=1)
        check_integer("delay", self.delay, minimum=0)
        check_integer("warmup_steps", self.warmup_steps, minimum=0)
        check_share("residual_decay", self.residual_decay, "what remains of a residual", "To keep all of it")
        given = {name: getattr(self, name) for name in OF_UPDATES}
        left_out = {one.name: one.default for one in fields(self) if one.name in OF_UPDATES} | {"local_steps": 1}
        if not updates and given != left_out:
            raise ValueError(
                "`compress='gradients'` exchanges gradients in every step and keeps all residuals; got"
                f" {', '.join(f'{name}={value}' for name, value in given.items())}. Leave these settings out, or use"
                " `compress='updates'`."
            )
        if self.delay > self.local_steps:  # type: ignore[operator]
            raise ValueError(
                f"`delay` must be at most `local_steps`, so that an exchange has arrived before the next one begins;"
                f" got delay={self.delay} and local_steps={self.local_steps}. Lower `delay` or raise `local_steps`."
            )

    @property
    def round_length(self) -> int:
        """Optimizer steps from one exchange to the next."""
        assert self.local_steps is not None
        return self.local_steps

    @property
    def steps_of_delay(self) -> float:
        """Optimizer steps until an unsent entry is sent, about."""
        return self.round_length / self.density

    @property
    def halves(self) -> bool:
        """Whether gradients of which everything is sent travel in half as many bits, as with DDP's bf16 hook."""
        return self.compress == "gradients" and self.density == 1.0 and self.value_format == "bf16"

    def check_patterns(self, parameter_names: list[str]) -> None:
        """Refuse patterns that match none of the model's parameters.

        Raises:
            ValueError: A pattern in ``density_per_parameter`` matches no name.
        """
        for pattern in self.density_per_parameter:
            if not any(fnmatchcase(name, pattern) for name in parameter_names):
                examples = ", ".join(repr(name) for name in parameter_names[:3])
                raise ValueError(
                    f"`density_per_parameter` has the pattern {pattern!r}, which matches no parameter of the"
                    f" model. Its names look like {examples}. Mend the pattern or remove it."
                )

    def density_of(self, parameter_name: str) -> float:
        """The density of one parameter."""
        patterns = self.density_per_parameter.items()
        return next((density for pattern, density in patterns if fnmatchcase(parameter_name, pattern)), self.density)


def check_keywords(kind: type, given: Iterable[str], *more: type) -> None:
    """Refuse keyword arguments that nobody takes, with the nearest name that somebody does.

    Args:
        kind: The class that is made; its base classes take what it passes on.
        given: The names of its keyword arguments.
        *more: Further classes that it passes them on to.

    Raises:
        TypeError: A name is not known.
    """
    taken = {
        name
        for cls in (*kind.__mro__, *more)
        if (constructor := vars(cls).get("__init__")) is not None
        for name, parameter in signature(constructor).parameters.items()
        if parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    } - {"self", "config", "module", "device_ids"}  # what strategies give themselves
    for name in sorted(set(given) - taken):
        nearest = get_close_matches(name, sorted(taken), n=3)
        meant = f" Did you mean {' or '.join(f'`{other}`' for other in nearest)}?" if nearest else ""
        raise TypeError(
            f"`{kind.__name__}` has no setting `{name}`.{meant} It takes those of `DCTConfig`, `DDPStrategy` and"
            " `DistributedDataParallel`."
        )


def check_density(setting: str, value: Any) -> None:
    """Refuse a share of entries outside (0, 1].

    Raises:
        TypeError: It is not a number.
        ValueError: It is out of range.
    """
    check_share(setting, value, "the share of entries that is sent", "To send everything")


def check_share(setting: str, value: Any, meaning: str, remedy: str) -> None:
    """Refuse what is outside (0, 1].

    Args:
        setting: Its name.
        value: What was given.
        meaning: What the number says.
        remedy: What 1.0 does.

    Raises:
        TypeError: It is not a number.
        ValueError: It is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"`{setting}` must be a number in (0, 1], such as 0.2; got {value!r}.")
    if not 0.0 < value <= 1.0:
        raise ValueError(
            f"`{setting}` is {meaning} and must be in (0, 1], such as 0.2; got {value!r}. {remedy} use 1.0."
        )


def check_integer(setting: str, value: Any, minimum: int) -> None:
    """Refuse a setting that is not a whole number or too small.

    Raises:
        TypeError: It is not a whole number.
        ValueError: It is below ``minimum``.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{setting}` must be a whole number of at least {minimum}; got {value!r}.")
    if value < minimum:
        raise ValueError(f"`{setting}` must be at least {minimum}; got {value!r}.")


def check_choice(setting: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse a setting that is none of its choices.

    Raises:
        ValueError: It is something else.
    """
    if value not in choices:
        raise ValueError(f"`{setting}` must be one of {', '.join(map(repr, choices))}; got {value!r}.")


def check_positive(setting: str, value: Any) -> None:
    """Refuse a setting that is not a number above zero.

    Raises:
        TypeError: It is not a number.
        ValueError: It is zero, negative, infinite or NaN.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"`{setting}` must be a number above 0; got {value!r}.")
    if not 0.0 < value < float("inf"):
        raise ValueError(f"`{setting}` must be above 0 and finite; got {value!r}.")
