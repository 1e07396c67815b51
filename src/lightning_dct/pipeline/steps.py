"""What the user's ``*_step`` takes and gives: batches, cut into micro-batches, and logs, which
every rank repeats.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torchmetrics import Metric

from lightning_dct.pipeline.mesh import to_device


@dataclass
class LogCall:
    """A call of ``self.log`` that can be sent to another rank."""

    name: str
    value: Any  # on the CPU; for a torchmetrics metric, the last result of its `forward`, or None
    metric: str | None = None  # the name of a logged metric in the model
    settings: dict[str, Any] = field(default_factory=dict)  # the other arguments


def loss_in(result: Any) -> Tensor:
    """The loss in the result of ``training_step`` (RuntimeError if none can be differentiated)."""
    loss = result.get("loss") if isinstance(result, dict) else result
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise RuntimeError(
            "`training_step` must return a loss that depends on the network's output: a tensor of"
            f" one entry, or a dict with one under 'loss'. It returned {type(result).__name__}."
            " Under `DCTPipelineStrategy` no micro-batch can be skipped."
        )
    return loss


def combine(micro_batches: Sequence[Sequence[LogCall]]) -> list[LogCall]:
    """The logs of a batch from those of its micro-batches.

    Values are combined like batches of an epoch: by ``reduce_fx``, by default the mean weighted by
    ``batch_size``.
    """
    by_name: dict[str, list[LogCall]] = {}
    for call in chain.from_iterable(micro_batches):
        by_name.setdefault(call.name, []).append(call)
    return [_combine(calls) for calls in by_name.values()]


def replay(module: pl.LightningModule, calls: Sequence[LogCall]) -> None:
    """Log on this rank what the last stage has logged."""
    for call in calls:
        value = to_device(call.value, module.device)
        if call.metric is not None:
            metric = module.get_submodule(call.metric)
            assert isinstance(metric, Metric)
            metric._forward_cache = value
            value = metric
        module.log(call.name, value, **call.settings)


def split_batch(batch: Any, parts: int) -> list[Any]:
    """Cut the tensors of a nested batch along dimension 0; every part gets all scalars and other
    objects.

    Tensors that cannot be cut into equal parts, or that have different numbers of rows, are refused
    (ValueError).
    """
    lengths = _lengths(batch)
    if not lengths:
        raise ValueError(
            "No tensors to cut into micro-batches are found in the training batch, a"
            f" {type(batch).__name__}. Have the loader's `collate_fn` return a tensor, or a dict,"
            " list or tuple of tensors."
        )
    for length in sorted(lengths):
        if length % parts:
            raise ValueError(
                f"`micro_batches={parts}` does not divide the training batch, which has {length}"
                f" rows on this pipeline. Choose a batch size that is a multiple of {parts} (and"
                " `drop_last=True` for the loader's last batch), or other `micro_batches`."
            )
    if len(lengths) > 1:
        raise ValueError(
            f"The training batch has tensors of {' and '.join(map(str, sorted(lengths)))} rows, and"
            " every tensor of it is cut into micro-batches along dimension 0. Give all of them a"
            " row for each sample, and keep what is no data, such as a weight for each feature, in"
            " the LightningModule."
        )
    return _cut(batch, parts)


def split_ragged(value: Any, parts: int, batch: Any) -> list[Any]:
    """Cut a network's arguments along dimension 0 into at most ``parts`` parts, whose sizes differ
    by at most 1.

    They are not cut if they have other numbers of rows than the batch, as if the sequence comes
    first, or as many rows as columns: then the sequence may come first, too.
    """
    lengths = _lengths(value)
    leaves = tree_leaves(value)
    is_batch = len(lengths) == 1 and all(
        _has_rows(leaf) and leaf.shape[1:2] != leaf.shape[:1] for leaf in leaves
    )
    if not is_batch or not lengths <= _lengths(batch) - {0}:
        return [value]
    return _cut(value, min(parts, *lengths))


def join(outputs: Sequence[Any]) -> Any:
    """Undo :func:`split_ragged` for the network's results."""
    if len(outputs) == 1:
        return outputs[0]
    rows = [
        next((len(leaf) for leaf in tree_leaves(output) if _has_rows(leaf)), 1)
        for output in outputs
    ]
    return tree_map(lambda *parts: _joined(parts, rows), *outputs)


def _cut(tree: Any, parts: int) -> list[Any]:
    leaves, structure = tree_flatten(tree)
    cut = [leaf.tensor_split(parts) if _has_rows(leaf) else (leaf,) * parts for leaf in leaves]
    return [tree_unflatten([leaf[part] for leaf in cut], structure) for part in range(parts)]


def _lengths(tree: Any) -> set[int]:
    """The numbers of rows of the tensors in a tree."""
    return {leaf.shape[0] for leaf in tree_leaves(tree) if _has_rows(leaf)}


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _joined(parts: Sequence[Any], rows: Sequence[int]) -> Any:
    """Rows one after the other; of a number such as an auxiliary loss the mean over all rows; else
    the first.
    """
    if _has_rows(parts[0]):
        return torch.cat([*parts])
    if not isinstance(parts[0], Tensor):
        return parts[0]
    weights = torch.tensor(rows, dtype=parts[0].dtype, device=parts[0].device)
    return (torch.stack([*parts]) * weights).sum() / sum(rows)


def recorder(module: pl.LightningModule, calls: list[LogCall]) -> Callable[..., None]:
    """A ``self.log`` that adds to a list instead."""
    arguments_of_log = inspect.signature(type(module).log)

    def record(*arguments: Any, **settings: Any) -> None:
        bound = arguments_of_log.bind(module, *arguments, **settings).arguments
        del bound["self"]
        name = bound.pop("name")
        value = bound.pop("value")
        if bound.get("sync_dist_group") is not None:
            raise ValueError(
                f"`self.log({name!r}, sync_dist_group=...)`: under `DCTPipelineStrategy` values are"
                " combined over the pipelines. Leave `sync_dist_group` out."
            )
        bound["enable_graph"] = False
        metric = None
        if isinstance(value, Metric):
            names = (attribute for attribute, child in module.named_modules() if child is value)
            metric = bound.get("metric_attribute") or next(names, None)
            if metric is None:
                raise ValueError(
                    "A torchmetrics metric was logged that is no attribute of the LightningModule,"
                    " so other ranks cannot find it. Assign it in `__init__`, or log"
                    " `metric.compute()`."
                )
            value = value._forward_cache
        calls.append(LogCall(name, to_device(value, "cpu"), metric, bound))

    return record


def _combine(calls: Sequence[LogCall]) -> LogCall:
    last = calls[-1]
    settings = dict(last.settings)
    sizes = [call.settings.get("batch_size") for call in calls]
    weights = None
    if all(size is not None for size in sizes):
        settings["batch_size"] = sum(sizes)
        weights = torch.tensor(sizes, dtype=torch.float32)
    values = [call.value for call in calls]
    if len(calls) == 1 or any(value is None for value in values):
        return replace(last, settings=settings)

    reduce_fx = settings.get("reduce_fx", "mean")
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")

    def combined(*leaf: Any) -> Tensor:
        stacked = torch.stack([torch.as_tensor(value).float().squeeze() for value in leaf])
        if name in ("mean", "avg"):
            return stacked.mean() if weights is None else (stacked * weights).sum() / weights.sum()
        return getattr(stacked, name)() if name in ("sum", "max", "min") else reduce_fx(stacked)

    return replace(last, value=tree_map(combined, *values), settings=settings)
