"""Compares settings, versions, the model and its optimizers over all ranks at setup, and names the
first difference.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_dct.__about__ import __version__
from lightning_dct.checksums import CheckpointError, checksums_of

TRAINER_SETTINGS = (
    *(
        "max_epochs",
        "max_steps",
        "min_epochs",
        "min_steps",
        "accumulate_grad_batches",
        "gradient_clip_val",
    ),
    *("gradient_clip_algorithm", "limit_train_batches", "limit_val_batches", "val_check_interval"),
    *("check_val_every_n_epoch", "num_sanity_val_steps", "precision"),
)

Result = TypeVar("Result")
# Of the kinds of tensors that `check_alike` compares, that of masks; and how names of weights that
# stay zero begin.
MASKS = 2
ZEROS_OF = "zeros of "
SAME_CHOICE = (
    "What code chooses by gradients (a mask, weights to prune or to grow), all ranks must choose"
    " alike: by the mean gradient, `strategy.reduce(parameter.grad.clone())` or"
    " `fabric.all_reduce`, or by the shared weights, as a validation sees them."
)


def check_agreement(
    settings: Mapping[str, Any], model: Module, group: dist.ProcessGroup | None
) -> None:
    """Compare settings, versions and the model over all ranks of a group, or all; a ValueError if
    they differ.

    The model must have the same parameters (names, shapes, dtypes and ``requires_grad``), except
    those that DistributedDataParallel ignores. Every rank names the first setting or parameter that
    differs, with all values.
    """
    parameters = describe_parameters(model)
    checksum = zlib.crc32(repr(parameters).encode())
    mine = {
        "version of lightning_dct": __version__,
        "version of torch": torch.__version__,
        **settings,
    }
    # Ranks with another version of lightning_dct must be able to read this.
    everyone = gather_objects({"mine": mine, "checksum": checksum}, group)
    for setting in dict.fromkeys(setting for theirs in everyone for setting in theirs["mine"]):
        _compare(setting, [theirs["mine"].get(setting) for theirs in everyone])
    if any(theirs["checksum"] != checksum for theirs in everyone):
        # The descriptions are sent only if they differ. Every rank has the same checksums and does
        # the same.
        descriptions = gather_objects(parameters, group)
        for name in dict.fromkeys(name for description in descriptions for name in description):
            _compare(
                f"parameter {name}",
                [description.get(name, "missing") for description in descriptions],
            )
        _compare("order of the parameters", [list(description) for description in descriptions])


def describe_parameters(model: Module) -> dict[str, str]:
    """Shape, dtype and ``requires_grad`` of each parameter, by name; a ValueError if one has no
    shape yet.
    """
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    found = {}
    for name, one in ((name, one) for name, one in model.named_parameters() if name not in ignored):
        if is_lazy(one):
            raise ValueError(
                f"Parameter {name!r} of a lazy layer has no shape yet, so ranks cannot begin with"
                " the same weights. Run a batch through the model in `configure_model`, or give"
                " the layer its sizes."
            )
        kind = "trained" if one.requires_grad else "frozen"
        found[name] = f"{list(one.shape)} {str(one.dtype).removeprefix('torch.')} {kind}"
    return found


def describe_optimizers(
    optimizers: Sequence[Optimizer], names: Mapping[Tensor, str]
) -> dict[str, Any]:
    """The class of each optimizer, and the settings and parameters of its groups, by name.

    ``names`` are those of the model's parameters.
    """
    found: dict[str, Any] = {"number of optimizers": len(optimizers)}
    for number, optimizer in enumerate(optimizers):
        own = f"optimizer {number}"
        groups = optimizer.param_groups
        found |= {
            f"class of {own}": type(optimizer).__name__,
            f"number of groups of {own}": len(groups),
        }
        for place, group in enumerate(groups):
            of = f"of {own}, group {place}"
            listed = [names.get(one, "") for one in group["params"]]
            found[f"number of parameters {of}"] = len(listed)
            found[f"checksum of the parameters' names {of}"] = zlib.crc32(repr(listed).encode())
            found |= {
                f"{setting} {of}": _plain(value)
                for setting, value in group.items()
                if setting != "params"
            }
    return found


def describe_run(trainer: Any, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """The settings of a Lightning Trainer, of its optimizers, and of its learning-rate schedulers,
    by name.
    """
    found = {f"Trainer({name})": getattr(trainer, name) for name in TRAINER_SETTINGS}
    found["automatic_optimization"] = trainer.lightning_module.automatic_optimization
    found |= describe_optimizers(trainer.optimizers, names)
    found["number of schedulers"] = len(trainer.lr_scheduler_configs)
    for number, one in enumerate(trainer.lr_scheduler_configs):
        own = f"of scheduler {number}"
        settings = {name: getattr(one, name) for name in ("interval", "frequency", "monitor")}
        settings |= getattr(one.scheduler, "state_dict", dict)()
        found[f"class {own}"] = type(one.scheduler).__name__
        found |= {f"{setting} {own}": _plain(value) for setting, value in settings.items()}
    return found


def _plain(value: Any) -> Any:
    """A value that ranks can compare: a number or text as it is, the class's name of any other
    object.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return _plain(value.item())
    if isinstance(value, float) and value != value:
        return "nan"  # which equals itself
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return (
        value
        if value is None or isinstance(value, bool | int | float | str)
        else type(value).__name__
    )


def check_alike(
    shared: Mapping[str, Tensor],
    others: Mapping[str, Tensor],
    peers: Sequence[int],
    masks: Mapping[str, Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Compare this rank's parameters with those of its peers, and warn if parameters that are not
    shared differ.

    All ranks of ``group``, by default all, call this together, also those with other peers. If
    shared ones differ, all raise a RuntimeError. ``masks`` that differ are warned of.
    """
    sums = [checksums_of(tensors) for tensors in (shared, others, masks or {})]
    known = gather_objects((tuple(peers), zlib.crc32(repr(sums).encode())), group)
    if len(set(known)) == len({of for of, _ in known}):
        return
    # The checksums of each parameter are sent only if some differ.
    ranks = range(len(known)) if group is None else dist.get_process_group_ranks(group)
    everyone = dict(zip(ranks, gather_objects((min(peers), sums), group), strict=True))
    for kind in (0, 1, 2):
        for rank, (first, theirs) in everyone.items():
            other = everyone[first][1][kind]
            names = [
                name for name in other | theirs[kind] if other.get(name) != theirs[kind].get(name)
            ]
            if names and kind == 0:
                raise RuntimeError(
                    f"The shared weights of {names[0]!r} on ranks {first} and {rank} differ, and"
                    " must be the same on all ranks, bit for bit. Something has written other"
                    " values on each rank outside `training_step`: an initialisation from the"
                    " rank's own data, a mask made from its own gradients,"
                    " `Embedding(max_norm=...)` in a validation, `eval()` and `train()` of a"
                    " schedule-free optimizer. Compute them on one rank and give them to all with"
                    " `broadcast` of strategy or Fabric, or write them in `training_step`, which"
                    f" exchanges them. {SAME_CHOICE} Learning rates and weight decays must be the"
                    " same, too: a scheduler may follow a rank's own loss."
                )
            if names and kind == MASKS:
                mask = names[0].removeprefix(ZEROS_OF)
                difference = (
                    f"Other entries of {mask!r} stay zero"
                    if mask != names[0]
                    else f"The mask {mask!r} is another one"
                )
                rank_zero_warn(
                    f"{difference} on rank {first} than on rank {rank}, as if each rank had chosen them"
                    " by its own gradients. The shared weights, which you validate and save,"
                    f" follow no rank's mask. {SAME_CHOICE} For bounds of weights, use `project=`."
                )
                return
            if names:
                rank_zero_warn(
                    f"The parameter {names[0]!r}, which no optimizer trains, has other values on"
                    f" rank {first} than on rank {rank}. Nothing exchanges it, so the ranks train"
                    " and validate different models. Give all ranks the same values."
                )
                return


def gather_objects(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's object, by rank; a collective call if there are several ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def on_all_ranks(
    work: Callable[[], Result], explain: Callable[[Exception], Exception]
) -> list[Result]:
    """The results of all ranks by rank, or the error of one rank, raised on every rank; a
    collective call.

    Without it the others would wait in their next collective for the rank that has failed. ``work``
    makes no collective call. ``explain`` gives the error that users see, which may be the error
    itself.
    """
    result: Any = None
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = explain(error)
        if failure is not error:
            failure.__cause__ = error
    kind = None if failure is None else _kind_elsewhere(failure)
    everyone = gather_objects((result, kind, str(failure), getattr(failure, "errno", None)))
    failed = [theirs[1:] for theirs in everyone if theirs[1] is not None]
    if not failed:
        return [theirs[0] for theirs in everyone]
    # All ranks raise the same kind of error, each its own if it has one.
    worst, message, number = next((one for one in failed if one[0] is CheckpointError), failed[0])
    if failure is not None and kind is worst:
        raise failure
    elsewhere = worst(message)
    if isinstance(elsewhere, OSError):
        elsewhere.errno = number
    raise elsewhere from failure


def like(error: OSError, message: str) -> OSError:
    """An error of the same kind and number with another message."""
    kind = _kind_elsewhere(error)
    explained = kind(message)
    assert isinstance(explained, OSError)
    explained.errno = error.errno
    return explained


def _kind_elsewhere(failure: Exception) -> type[Exception]:
    """The kind of a failure on ranks that have not failed, which may not know its class: one that
    takes a message.
    """
    if type(failure) in (CheckpointError, ValueError, TypeError):
        return type(failure)
    of_files = (
        kind
        for kind in type(failure).__mro__
        if kind.__module__ == "builtins" and issubclass(kind, OSError)
    )
    return next(of_files, RuntimeError)


def _compare(subject: str, values: list[Any]) -> None:
    if any(value != values[0] for value in values):
        received = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
        raise ValueError(
            f"The ranks disagree on `{subject}` ({received}). Use the same value on all ranks."
        )


@contextmanager
def without_bound_device() -> Iterator[None]:
    """A context in which groups of gloo can be made beside a GPU's default group.

    Lightning binds the default group to the GPU, whatever its backend. Then ranks outside a new
    group ask it to split, which gloo cannot do, and NCCL does only if all ranks ask.
    """
    world: Any = dist.group.WORLD
    bound = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound
