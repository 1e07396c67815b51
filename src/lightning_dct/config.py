"""The settings of compression: a frozen dataclass that checks them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from inspect import Parameter, signature
from numbers import Integral
from typing import Any, Literal, get_args, get_origin

from lightning_dct.kernels import KernelName

ValueFormat = Literal["fp32", "bf16", "2bit", "1bit"]
VALUE_FORMATS: tuple[str, ...] = get_args(ValueFormat)
ExchangeName = Literal["auto", "all_gather", "two_phase", "hierarchical"]
MissingState = Literal["error", "reset"]
Compress = Literal["updates", "gradients"]
# Settings for updates only.
OF_UPDATES = (
    "local_steps",
    "overlap_steps",
    "warmup_steps",
    "residual_decay",
    "share_second_moments",
)


@dataclass(frozen=True)
class DCTConfig:
    """The settings: what is sent, in which format, and when thresholds are selected.

    Strategies, :class:`~lightning_dct.Updates` and :class:`~lightning_dct.Gradients` take them as
    keyword arguments. With updates, a run chooses ``local_steps`` and ``density`` by its length if
    they are left out: ``docs/settings.md`` has the table. A ``DCTConfig`` by itself knows no run,
    and takes the first row of that table: an exchange of 30% of the entries after every step.

    Attributes:
        compress: What the ranks exchange. ``"updates"``: the updates of weights since the last
            exchange, while each rank's optimizer trains on its own gradients. ``"gradients"``:
            gradients in every backward, as the paper does. With Adam or momentum the latter loses
            quality, because residuals delay gradients and release them in bursts.
        local_steps: Optimizer steps from one exchange of updates to the next, at least 1; by
            default 1 or ``overlap_steps``. Gradients are exchanged in every step.
        warmup_steps: Optimizer steps in which updates are exchanged after every step, each time
            proportionally fewer entries unless a density is 1. Otherwise ranks would drift apart
            while weights move fast.
        residual_decay: Factor on an update's residual after each exchange of the warm-up, in (0,
            1]. Less than 1 keeps the ranks together at learning rates that are too large for the
            batch of one rank. After the warm-up the factor is 1. None stands for 0.95 less half the
            density, and for 0.95 with optimizers whose steps grow with their gradients, as SGD.
        share_second_moments: Average over the ranks, from time to time, what an optimizer has
            learnt about the size of gradients, such as Adam's ``exp_avg_sq``. Without that, ranks
            whose data differ end elsewhere than under plain DDP.
        overlap_steps: Optimizer steps for which an exchange of updates may be in flight during
            training, at most ``local_steps``. With 0 training waits for it. From 1 on tensors take
            turns, so that the load on the link is even.
        density: Share of each tensor's entries that an exchange sends, in (0, 1]. 1.0 sends
            everything, as plain DDP does.
        density_per_parameter: Densities for some parameters, by name pattern (``fnmatch``
            wildcards, as in ``{"*.embedding.weight": 0.001}``). The first pattern that matches a
            name wins. A pattern that matches no parameter is an error.
        refresh_every: Optimizer steps between two selections of the thresholds.
        value_format: The format of a sent entry: ``"fp32"``, ``"bf16"``, ``"2bit"`` (two magnitudes
            for each tensor) or ``"1bit"`` (its sign, times the mean magnitude of what the tensor
            sends). Rounding errors stay in the residual. Gradients with a density of 1 are averaged
            in bfloat16 with ``"bf16"``.
        min_tensor_size: Tensors with fewer entries are sent dense, in their own dtype.
        adapt_threshold: Adjust thresholds between refreshes, so that the number of sent entries
            stays near its target.
        exchange: How payloads reach the other ranks: ``"all_gather"`` (each rank sends to all),
            ``"two_phase"`` (to the owner of each piece of the model, who sums, thresholds again and
            sends to all), ``"hierarchical"`` (dense inside a node, compressed between nodes) or
            ``"auto"``, which chooses by counted bytes and logs its choice.
        kernel: Implementation of the selection and the sum: ``"torch"``, ``"numba"`` (on the CPU)
            or ``"auto"``, the fastest that is installed. All give the same results to the last bit.
        missing_state: What happens if a run resumes from a checkpoint without the folder that was
            saved beside it: ``"error"``, or ``"reset"``, which continues with empty residuals and
            logs that. Without the rows of sharded tables, which are part of the model, it is always
            an error.
    """

    compress: Compress = "updates"
    local_steps: int = None  # type: ignore[assignment]  # until it is checked
    warmup_steps: int = 320
    residual_decay: float | None = None
    share_second_moments: bool = True
    overlap_steps: int = 0
    density: float = 0.3
    density_per_parameter: Mapping[str, float] = field(default_factory=dict)
    refresh_every: int = 1000
    value_format: ValueFormat = "1bit"
    min_tensor_size: int = 16
    adapt_threshold: bool = True
    exchange: ExchangeName = "auto"
    kernel: KernelName = "auto"
    missing_state: MissingState = "error"

    def __post_init__(self) -> None:
        for one in fields(self):
            if get_origin(one.type) is Literal:
                check_choice(one.name, getattr(self, one.name), get_args(one.type))
        if self.density is None:
            object.__setattr__(self, "density", DCTConfig.density)
        check_density("density", self.density)
        if not isinstance(self.density_per_parameter, Mapping):
            raise TypeError(
                "`density_per_parameter` must map parameter-name patterns to densities, as in"
                f" {{'*.embedding.weight': 0.001}}; got {self.density_per_parameter!r}."
            )
        for pattern, density in self.density_per_parameter.items():
            check_density(f"density_per_parameter[{pattern!r}]", density)
        # A copy as plain dict: later changes of the caller's must have no effect, and Hydra's
        # mapping types must not enter checkpoints or other processes.
        plain = {
            str(pattern): float(density) for pattern, density in self.density_per_parameter.items()
        }
        object.__setattr__(self, "density_per_parameter", plain)
        for name, least in (
            ("refresh_every", 1),
            ("min_tensor_size", 0),
            ("overlap_steps", 0),
            ("warmup_steps", 0),
        ):
            check_integer(name, getattr(self, name), least)
        for name in ("adapt_threshold", "share_second_moments"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"`{name}` must be True or False, got {getattr(self, name)!r}.")
        updates = self.compress == "updates"
        if self.local_steps is None:
            object.__setattr__(self, "local_steps", max(1, self.overlap_steps) if updates else 1)
        check_integer("local_steps", self.local_steps, minimum=1)
        if self.residual_decay is not None:
            check_density(
                "residual_decay",
                self.residual_decay,
                "what remains of a residual",
                "To keep all of it",
            )
        # Numbers of numpy, as a sweep may give, are unreadable in a log of settings.
        for name, value in vars(self).items():
            if isinstance(value, Integral | float) and not isinstance(value, bool):
                object.__setattr__(
                    self, name, int(value) if isinstance(value, Integral) else float(value)
                )
        defaults = {name: getattr(DCTConfig, name) for name in OF_UPDATES} | {"local_steps": 1}
        changed = [
            f"{name}={value}"
            for name, default in defaults.items()
            if (value := getattr(self, name)) != default
        ]
        if changed and not updates:
            raise ValueError(
                "`compress='gradients'` exchanges gradients in every step and keeps all residuals;"
                f" got {', '.join(changed)}. Leave that out, or use `compress='updates'`."
            )
        if self.overlap_steps > self.local_steps:
            raise ValueError(
                "`overlap_steps` must be at most `local_steps`, so that an exchange has arrived"
                f" before the next one begins; got overlap_steps={self.overlap_steps} and"
                f" local_steps={self.local_steps}. Lower `overlap_steps` or raise `local_steps`."
            )

    def length_at(self, step: int) -> int:
        """Optimizer steps from one exchange to the next, at a step (from 1 on).

        Weights move fastest during warm-up, and ranks that drift apart then cannot be averaged any
        more (Lin et al., *Don't Use Large Mini-Batches, Use Local SGD*, ICLR 2020). So until then a
        round is one step long, and sends proportionally less: the delay, about length / density, is
        the same. Without that GPT-2 at its largest rate lost 7% in 1,000 steps.
        """
        return 1 if step <= self.warmup_steps else self.local_steps

    def kept_of_residuals(self, is_scale_invariant: bool) -> float:
        """What remains of a residual after an exchange of the warm-up.

        ``is_scale_invariant`` says whether the optimizer's steps do not grow with their gradients.
        If they do, nothing makes up for what a residual has lost.
        """
        if self.residual_decay is not None:
            return self.residual_decay
        return 0.95 - 0.5 * self.density if is_scale_invariant else 0.95

    @property
    def exchanges_every_step(self) -> bool:
        """Whether updates of one step are exchanged at once: then their means have a gain that is
        measured.
        """
        return self.compress == "updates" and self.local_steps == 1 and not self.overlap_steps

    @property
    def averages_in_bf16(self) -> bool:
        """Whether dense gradients are averaged in bfloat16, as with DDP's bf16 hook."""
        return self.compress == "gradients" and self.density == 1.0 and self.value_format == "bf16"

    def check_patterns(self, parameter_names: list[str]) -> None:
        """Refuse a pattern in ``density_per_parameter`` that matches none of the model's parameters
        (ValueError).
        """
        for pattern in self.density_per_parameter:
            if not any(fnmatchcase(name, pattern) for name in parameter_names):
                examples = ", ".join(repr(name) for name in parameter_names[:3])
                raise ValueError(
                    f"`density_per_parameter` has the pattern {pattern!r}, which matches no"
                    f" parameter of the model. Its names look like {examples}. Fix the pattern or"
                    " remove it."
                )

    def density_of(self, parameter_name: str) -> float:
        """The density of one parameter."""
        patterns = self.density_per_parameter.items()
        return next(
            (density for pattern, density in patterns if fnmatchcase(parameter_name, pattern)),
            self.density,
        )


# Arguments of constructors that strategies set themselves.
SET_BY_STRATEGIES = {
    "self",
    "config",
    "given",
    "module",
    "device_ids",
    "wrap_unit",
    "shard_settings",
}
SET_BY_STRATEGIES |= {"data_parallel_size", "tensor_parallel_size"}
# What users give to a strategy and is the Trainer's.
OF_TRAINER = {
    "accelerator",
    "devices",
    "num_nodes",
    "precision",
    "max_steps",
    "max_epochs",
    "accumulate_grad_batches",
}


class UsageError(ValueError):
    """A command cannot do what its user asks for; the message says why.

    Any other error of it is a bug.
    """


def check_keywords(kind: type, given: Iterable[str], *more: type) -> None:
    """Refuse unknown keyword arguments of a class and suggest the nearest names (TypeError).

    It forwards keyword arguments to its base classes. It takes the settings of ``more``, too, which
    the message names.
    """
    taken = {
        name
        for cls in (*kind.__mro__, *more)
        if (constructor := vars(cls).get("__init__")) is not None
        for name, parameter in signature(constructor).parameters.items()
        if parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    } - SET_BY_STRATEGIES
    for name in sorted(set(given) - taken):
        nearest = get_close_matches(name, sorted(taken), n=3)
        meant = (
            f" Did you mean {' or '.join(f'`{other}`' for other in nearest)}?" if nearest else ""
        )
        if name in OF_TRAINER:
            meant = f" Give `{name}` to the `Trainer`."
        *first, last = (f"`{cls.__name__}`" for cls in more)
        those = f"{', '.join(first)} and {last}" if first else last
        raise TypeError(
            f"`{kind.__name__}` has no setting `{name}`.{meant} It takes its own and those of"
            f" {those}."
        )


def check_density(
    setting: str,
    value: Any,
    meaning: str = "the share of entries that is sent",
    remedy: str = "To send everything",
) -> None:
    """Refuse a value that is no number (TypeError) in (0, 1] (ValueError); ``remedy`` says what 1.0
    does.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"`{setting}` must be a number in (0, 1], such as 0.2; got {value!r}.")
    if not 0.0 < value <= 1.0:
        raise ValueError(
            f"`{setting}` is {meaning} and must be in (0, 1], such as 0.2; got {value!r}. {remedy}"
            " use 1.0."
        )


def check_integer(setting: str, value: Any, minimum: int) -> None:
    """Refuse a value that is no integer (TypeError) or is below ``minimum`` (ValueError)."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{setting}` must be a whole number of at least {minimum}; got {value!r}.")
    if value < minimum:
        raise ValueError(f"`{setting}` must be at least {minimum}; got {value!r}.")


def check_choice(setting: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse a value that is none of the choices (ValueError)."""
    if value not in choices:
        raise ValueError(
            f"`{setting}` must be one of {', '.join(map(repr, choices))}; got {value!r}."
        )
