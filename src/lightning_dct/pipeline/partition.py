"""Cuts the model at its split points, and frees the pieces that live on other ranks.

Every rank keeps the whole module tree, with the same names and the same order of parameters. Parameters and buffers of
other ranks' pieces are on the meta device, where they have shapes but no memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_dct.activations import Split
from lightning_dct.pipeline.sequential import SplitSequential


@dataclass(frozen=True)
class Piece:
    """The modules between two split points.

    Attributes:
        index: Its number, from 0.
        names: The names of its children in the Sequential.
        modules: These children, in order, beside the model's own tree.
        split: The split point that ends it; None for the last piece.
    """

    index: int
    names: tuple[str, ...]
    modules: SplitSequential
    split: Split | None


def find_pipeline(module: nn.Module) -> tuple[str, nn.Sequential]:
    """Find the name of the one Sequential with split points, and it (ValueError if there is not exactly one)."""
    found = [
        (name, child)
        for name, child in module.named_modules()
        if isinstance(child, nn.Sequential) and any(isinstance(part, Split) for part in child)
    ]
    if len(found) != 1:
        have = "none has" if not found else f"{', '.join(repr(name) for name, _ in found)} have"
        raise ValueError(
            "`DCTPipelineStrategy` cuts the one `torch.nn.Sequential` of the model that has `SplitPoint` modules among"
            f" its children; here {have}. Build the network as one Sequential with a SplitPoint between every two"
            " stages."
        )
    return found[0]


def cut(pipeline: nn.Sequential) -> list[Piece]:
    """Cut a Sequential at its split points (ValueError if a piece has no modules)."""
    pieces: list[Piece] = []
    children: OrderedDict[str, nn.Module] = OrderedDict()
    for name, child in [*pipeline.named_children(), ("", None)]:
        if child is not None and not isinstance(child, Split):
            children[name] = child
            continue
        if not children:
            raise ValueError(
                f"Piece {len(pieces)} of the pipeline is empty: a `SplitPoint` must stand between two modules of the"
                " Sequential, not at its beginning or end or beside another one."
            )
        pieces.append(Piece(len(pieces), tuple(children), SplitSequential(children), child))
        children = OrderedDict()
    return pieces


def check_pieces(pieces: Sequence[Piece], stages: int, interleaved: bool) -> None:
    """Refuse a number of pieces that does not fit the stages (ValueError)."""
    count = len(pieces)
    fits = count % stages == 0 and count > stages if interleaved else count == stages
    if not fits:
        needed = (
            f"a multiple of `stages` above it ({2 * stages} pieces, which {2 * stages - 1} split points make)"
            if interleaved
            else f"as many pieces as stages ({stages - 1} split points)"
        )
        schedule = "'interleaved_1f1b'" if interleaved else "'gpipe' and '1f1b'"
        raise ValueError(
            f"The model's SplitPoint modules cut it into {count} pieces, and `stages={stages}`: the schedule"
            f" {schedule} takes {needed}. Change the split points, `stages` or `schedule`."
        )


def check_parameters(module: nn.Module, pipeline: nn.Sequential, pieces: Sequence[Piece], stages: int) -> None:
    """Refuse a trainable parameter outside the Sequential or on two stages, and a stage without any (ValueError)."""
    inside = {id(parameter) for parameter in pipeline.parameters()}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in inside:
            raise ValueError(
                f"The parameter {name!r} lies outside the Sequential that `DCTPipelineStrategy` cuts into stages, so"
                " no stage could train it. Move its module into the Sequential, or freeze it."
            )
    owners: dict[int, int] = {}
    for piece in pieces:
        for name, parameter in piece.modules.named_parameters():
            stage = piece.index % stages
            if owners.setdefault(id(parameter), stage) != stage:
                raise ValueError(
                    f"The parameter {name!r} of piece {piece.index} is also used on stage {owners[id(parameter)]}:"
                    " stages on different ranks cannot share a parameter. Untie the weights, or put both uses into"
                    " one piece."
                )
    for stage in range(stages):
        trained = [p for piece in pieces[stage::stages] for p in piece.modules.parameters() if p.requires_grad]
        if not trained:
            raise ValueError(
                f"Stage {stage} of the pipeline has no trainable parameter. Move a SplitPoint, so that every stage"
                " has some, or use fewer stages."
            )


def release(pieces: Iterable[Piece]) -> None:
    """Move the parameters and buffers of some pieces to the meta device."""
    _replace(pieces, lambda tensor: tensor.to("meta"))


def materialise(pieces: Iterable[Piece]) -> None:
    """Give released pieces uninitialised memory on the CPU."""
    _replace(pieces, lambda tensor: torch.empty_like(tensor, device="cpu"))


@contextmanager
def hidden(pipeline: nn.Sequential, pieces: Iterable[Piece]) -> Iterator[None]:
    """Keep some pieces out of the model, because meta tensors cannot be moved to another device."""
    names = [name for piece in pieces for name in piece.names]
    children = {name: pipeline._modules[name] for name in names}
    try:
        pipeline._modules.update({name: nn.Identity() for name in names})
        yield
    finally:
        pipeline._modules.update(children)


def _replace(pieces: Iterable[Piece], convert: Callable[[Tensor], Tensor]) -> None:
    """Replace all tensors of some pieces; shared tensors stay shared."""
    converted: dict[int, Tensor] = {}
    originals: list[Tensor] = []  # kept alive, so that no two of them have the same id
    for piece in pieces:
        for module in piece.modules.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in converted:
                        originals.append(tensor)
                        new = convert(tensor.detach())
                        if isinstance(tensor, nn.Parameter):
                            new = nn.Parameter(new, tensor.requires_grad)
                        converted[id(tensor)] = new
                    tensors[name] = converted[id(tensor)]  # type: ignore[assignment]
