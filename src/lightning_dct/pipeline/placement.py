"""Cuts the model at its split points, and places the pieces on the ranks of a pipeline.

Every rank keeps the whole module tree, with the same names and the same order of parameters. Other
ranks' pieces are on the meta device during fit, where parameters and buffers have shapes but no
memory.
"""

from collections import ChainMap, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dct.activations.split_point import SplitPoint
from lightning_dct.pipeline.mesh import PipelineMesh
from lightning_dct.pipeline.sequential import SplitSequential
from lightning_dct.sync.shared_weights import start_alike


@dataclass(frozen=True)
class Piece:
    """The modules between two split points."""

    index: int
    modules: SplitSequential  # children of the model's Sequential, by their names there; outside the model's own tree
    split: SplitPoint | None  # the one at its end


class Placement:
    """The pieces of a model on the ranks of a mesh; piece ``i`` lives on stage ``i % stages``.

    With ``interleaved`` a rank runs several. Models that cannot be cut for so many stages are
    refused (ValueError).
    """

    def __init__(self, model: nn.Module, mesh: PipelineMesh, interleaved: bool) -> None:
        self.model = model
        self.mesh = mesh
        self.network = find_pipeline(model)
        self.pieces = cut(self.network)
        check_pieces(self.pieces, mesh.stages, interleaved)
        self.splits = [piece.split for piece in self.pieces if piece.split is not None]
        self.own = self.pieces[mesh.stage :: mesh.stages]
        self.foreign = [piece for piece in self.pieces if piece.index % mesh.stages != mesh.stage]
        # Whether other ranks' pieces are on the meta device.
        self.spread = False

    @property
    def not_synchronised(self) -> list[str]:
        """The names of all tensors that DistributedDataParallel must ignore."""
        ignored = self._names(self.foreign)
        parameters = self.model.named_parameters(remove_duplicate=False)
        buffers = self.model.named_buffers(remove_duplicate=False)
        return [name for name, _ in chain(parameters, buffers) if name.startswith(ignored)]

    def part_of(self, stage: int, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a stage's pieces, and of the split points at their ends, whose thresholds it
        selects.

        The last stage, which alone runs steps to their end, also has the state outside the network.
        """
        own = self._names(self.pieces[stage :: self.mesh.stages])
        inside = self._names(self.pieces) if stage == self.mesh.stages - 1 else ("",)
        return {
            name: one
            for name, one in state.items()
            if name.startswith(own) or not name.startswith(inside)
        }

    def drop_foreign(self, saved: dict[str, Any]) -> None:
        """Drop residuals and waiting gradients of other ranks' pieces from a state of another
        number of stages.
        """
        foreign = self._names(self.foreign)
        for part in ("residuals", "accumulated"):
            saved[part] = {
                name: one
                for name, one in saved.get(part, {}).items()
                if not name.startswith(foreign)
            }

    def check_parameters(self) -> None:
        """Refuse parameters that no stage or two stages would train, and a stage without any
        (ValueError).
        """
        inside = {id(parameter) for parameter in self.network.parameters()}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and id(parameter) not in inside:
                raise ValueError(
                    f"The parameter {name!r} lies outside the Sequential that `DCTPipelineStrategy`"
                    " cuts into stages, so no stage could train it. Move its module into the"
                    " Sequential, or freeze it."
                )
        owners: dict[int, int] = {}
        for piece in self.pieces:
            stage = piece.index % self.mesh.stages
            for name, tensor in chain(
                piece.modules.named_parameters(), piece.modules.named_buffers()
            ):
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                if owners.setdefault(id(tensor), stage) != stage:
                    raise ValueError(
                        f"The {kind} {name!r} of piece {piece.index} is also used on stage"
                        f" {owners[id(tensor)]}: stages on different ranks cannot share it. Make a"
                        " module for each, untie the weights, or put both uses into one piece."
                    )
        self.check_trained()

    def check_trained(self) -> None:
        """Refuse a stage without a trainable parameter (ValueError); callbacks may freeze some."""
        for stage in range(self.mesh.stages):
            pieces = self.pieces[stage :: self.mesh.stages]
            if not any(
                parameter.requires_grad
                for piece in pieces
                for parameter in piece.modules.parameters()
            ):
                raise ValueError(
                    f"Stage {stage} of the pipeline has no trainable parameter. Move a SplitPoint,"
                    " so that every stage has some, or use fewer stages."
                )

    @contextmanager
    def without_foreign(self) -> Iterator[None]:
        """Keep other ranks' pieces out of the model, because meta tensors cannot be moved to
        another device.
        """
        foreign = {module for piece in self.foreign for module in piece.modules.modules()}
        children = [
            (parent._modules, *child)
            for parent in self.model.modules()
            for child in parent._modules.items()
        ]
        places = [(among, name, child) for among, name, child in children if child in foreign]
        try:
            for among, name, _ in places:
                among[name] = nn.Identity()
            yield
        finally:
            for among, name, child in places:
                among[name] = child

    def gather_stages(self) -> None:
        """Copy what each stage has trained, on the CPU, to the other ranks of the pipeline."""
        convert(self.foreign, lambda tensor: torch.empty_like(tensor, device="cpu"))
        tensors = dict(chain(self.model.named_parameters(), self.model.named_buffers()))
        for stage in range(self.mesh.stages):
            start_alike(self.part_of(stage, tensors).values(), self.mesh.control, source=stage)
        for number, split in enumerate(self.splits):
            split.load_state_dict(self.mesh.share(split.state_dict(), number % self.mesh.stages))
        self.spread = False

    def copy_from_rank_zero(self) -> None:
        """Give every rank the model of rank 0, as DDPStrategy does for evaluation."""
        # After a failed fit each rank has only its own pieces.
        if any(tensor.is_meta for tensor in chain(self.model.parameters(), self.model.buffers())):
            return
        states = [split.state_dict() for split in self.splits]
        dist.broadcast_object_list(states, src=0, group=self.mesh.everyone)
        for split, state in zip(self.splits, states, strict=True):
            split.load_state_dict(state)
        start_alike(chain(self.model.parameters(), self.model.buffers()), self.mesh.everyone)

    def _names(self, pieces: Iterable[Piece]) -> tuple[str, ...]:
        """The beginnings of all names of what is in some pieces and at their ends: a child may be
        elsewhere, too.
        """
        modules = {module for piece in pieces for module in (*piece.modules.modules(), piece.split)}
        return tuple(
            f"{name}."
            for name, one in self.model.named_modules(remove_duplicate=False)
            if one in modules
        )


def find_pipeline(module: nn.Module) -> nn.Sequential:
    """The one Sequential with split points (ValueError if there is not exactly one)."""
    found = {
        name: child
        for name, child in module.named_modules()
        if isinstance(child, nn.Sequential) and any(isinstance(part, SplitPoint) for part in child)
    }
    if len(found) != 1:
        have = "none has any" if not found else f"{', '.join(map(repr, found))} have them"
        raise ValueError(
            "`DCTPipelineStrategy` needs exactly one `torch.nn.Sequential` in the model with"
            f" `SplitPoint` modules among its children, but {have}. Build the network as one"
            " Sequential with a SplitPoint between every two stages."
        )
    (network,) = found.values()
    kind = type(network)
    if kind.forward not in (nn.Sequential.forward, SplitSequential.forward):
        raise ValueError(
            f"The Sequential with `SplitPoint` modules is a {kind.__name__}, whose own `forward` no"
            " stage would run. Move what it does into the first or the last child."
        )
    return network


def cut(pipeline: nn.Sequential) -> list[Piece]:
    """Cut a Sequential at its split points (ValueError if a piece has no modules, or two a split
    point).
    """
    pieces: list[Piece] = []
    children: OrderedDict[str, nn.Module] = OrderedDict()
    # Not `named_children`, which leaves out repetitions of a child that stands in several places,
    # such as a ReLU.
    for name, child in [*pipeline._modules.items(), ("", None)]:
        if child is not None and not isinstance(child, SplitPoint):
            children[name] = child
            continue
        if child is not None and any(piece.split is child for piece in pieces):
            raise ValueError(
                f"The `SplitPoint` {name!r} of the pipeline stands in two places. Make one for"
                " each."
            )
        if not children:
            raise ValueError(
                f"Piece {len(pieces)} of the pipeline is empty: a `SplitPoint` must stand between"
                " two modules of the Sequential, not at its beginning or end or beside another"
                " one."
            )
        pieces.append(Piece(len(pieces), SplitSequential(children), child))
        children = OrderedDict()
    return pieces


def check_pieces(pieces: Sequence[Piece], stages: int, interleaved: bool) -> None:
    """Refuse a number of pieces that does not fit the stages (ValueError)."""
    count = len(pieces)
    if interleaved:
        fits = count % stages == 0 and count > stages
        takes = "schedule 'interleaved_1f1b' takes"
        needed = (
            f"a multiple of `stages` above it ({2 * stages} pieces, which {2 * stages - 1} split"
            " points make)"
        )
    else:
        fits = count == stages
        takes = "schedules 'gpipe' and '1f1b' take"
        needed = f"as many pieces as stages ({stages - 1} split points)"
    if not fits:
        raise ValueError(
            f"The SplitPoint modules of the model cut it into {count} pieces, and"
            f" `stages={stages}`. The {takes} {needed}. Change the split points, `stages` or"
            " `schedule`."
        )


def convert(pieces: Iterable[Piece], function: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer of some pieces by a function of it; shared tensors stay
    shared.
    """
    converted: dict[Tensor, Tensor] = {}
    for module in (module for piece in pieces for module in piece.modules.modules()):
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in converted:
                    new = function(tensor.detach())
                    is_parameter = isinstance(tensor, nn.Parameter)
                    converted[tensor] = (
                        nn.Parameter(new, tensor.requires_grad) if is_parameter else new
                    )
                tensors[name] = converted[tensor]  # type: ignore[assignment]


def part_of_optimizer_state(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """The state of this rank's parameters, from ``optimizer.state_dict()`` or a saved one of the
    whole model.

    The optimizer has all parameters, including those on the meta device, in the same order on every
    rank.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    here = {
        number
        for number, parameter in zip(numbers, parameters, strict=False)
        if not parameter.is_meta
    }
    # State without a parameter stays.
    kept = {
        key: value for key, value in state["state"].items() if key in here or key not in numbers
    }
    return {**state, "state": kept}


def merge_optimizer_states(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of all parameters, in their order; state without a parameter is the first
    stage's.
    """
    merged = ChainMap(*(part["state"] for part in parts))
    ordered = sorted(
        merged.items(), key=lambda item: (not isinstance(item[0], int), str(item[0]).zfill(12))
    )
    return {**parts[0], "state": dict(ordered)}
