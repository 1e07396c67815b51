"""Which pieces of a model this rank runs, and how the model is spread over the ranks and made whole again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lightning_dct.activations import Split
from lightning_dct.pipeline import partition
from lightning_dct.pipeline.gathering import to_cpu
from lightning_dct.pipeline.mesh import PipelineMesh


class Placement:
    """The pieces of a model on the ranks of a mesh; piece ``i`` lives on stage ``i % stages``.

    Args:
        model: The whole model.
        mesh: This rank's place.
        interleaved: Whether a rank runs more than one piece.

    Raises:
        ValueError: The model cannot be cut into pieces for so many ranks.
    """

    def __init__(self, model: nn.Module, mesh: PipelineMesh, interleaved: bool) -> None:
        self.model = model
        self.mesh = mesh
        name, self.network = partition.find_pipeline(model)
        self._prefix = f"{name}." if name else ""
        self.pieces = partition.cut(self.network)
        partition.check_pieces(self.pieces, mesh.stages, interleaved)
        self.own = self.pieces[mesh.stage :: mesh.stages]
        self.foreign = [piece for piece in self.pieces if piece.index % mesh.stages != mesh.stage]
        # Whether other ranks' pieces have no memory here.
        self.spread = False

    @property
    def not_synchronised(self) -> list[str]:
        """All names of the tensors that DistributedDataParallel must ignore."""
        # Other ranks' pieces, and split points: each replica has its own thresholds.
        ignored = self._names(self.foreign) + tuple(f"{name}." for name in self.split_points)
        parameters = self.model.named_parameters(remove_duplicate=False)
        buffers = self.model.named_buffers(remove_duplicate=False)
        return [name for name, _ in chain(parameters, buffers) if name.startswith(ignored)]

    @property
    def own_parameters(self) -> list[nn.Parameter]:
        """The parameters that this rank trains, each once."""
        found = {id(p): p for piece in self.own for p in piece.modules.parameters() if p.requires_grad}
        return list(found.values())

    @property
    def split_points(self) -> dict[str, Split]:
        """All split points of the network, by name: every rank has them, because they set the size of payloads."""
        children = self.network.named_children()
        return {self._prefix + name: child for name, child in children if isinstance(child, Split)}

    @property
    def own_split_points(self) -> dict[str, Split]:
        """The split points at the end of this rank's pieces, whose thresholds it selects."""
        own = {id(piece.split) for piece in self.own}
        return {name: split for name, split in self.split_points.items() if id(split) in own}

    @property
    def thresholds(self) -> dict[str, Any]:
        """The state of this rank's split points, on the CPU."""
        return {name: to_cpu(split.state_dict()) for name, split in self.own_split_points.items()}

    def own_part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The part of the model's state that this rank trains and selects."""
        own = self._names(self.own) + tuple(f"{name}." for name in self.own_split_points)
        return {name: value for name, value in state.items() if name.startswith(own)}

    def take_over(self, saved: dict[str, Any]) -> None:
        """Load the thresholds of a saved compression state, and drop residuals of other ranks' pieces from it."""
        foreign = self._names(self.foreign)
        # If another number of stages saved it, it has some.
        saved["residuals"] = {name: r for name, r in saved["residuals"].items() if not name.startswith(foreign)}
        for name, split in self.own_split_points.items():
            # Lightning's file has the thresholds of the first replica only.
            if name in saved.get("split_points", {}):
                split.load_state_dict(saved["split_points"][name])

    def check_parameters(self) -> None:
        """Refuse parameters that no rank, or more than one, would train (ValueError)."""
        partition.check_parameters(self.model, self.network, self.pieces, self.mesh.stages)

    def spread_out(self) -> None:
        """Free the pieces of other ranks."""
        partition.release(self.foreign)
        self.spread = True

    def without_foreign(self) -> AbstractContextManager[None]:
        """A context in which the model has only this rank's pieces, so that it can be moved."""
        return partition.hidden(self.network, self.foreign)

    def make_whole(self) -> None:
        """Copy every piece, on the CPU, from the rank that has trained it to the others of the pipeline."""
        partition.materialise(self.foreign)
        for piece in self.pieces:
            owner = piece.index % self.mesh.stages
            for tensor in _tensors_of(piece.modules):
                self.mesh.broadcast(tensor, owner)
            if piece.split is not None:
                piece.split.load_state_dict(self.mesh.share(piece.split.state_dict(), owner))
        self.spread = False

    def copy_from_rank_zero(self) -> None:
        """Give every rank the model of rank 0, as DDPStrategy does for evaluation."""
        tensors = _tensors_of(self.model)
        if any(tensor.is_meta for tensor in tensors):  # after a failed fit each rank has only what it runs
            return
        box = [{name: to_cpu(split.state_dict()) for name, split in self.split_points.items()}]
        dist.broadcast_object_list(box, src=0, group=self.mesh.everyone)
        for name, split in self.split_points.items():
            split.load_state_dict(box[0][name])  # its buffers may have other sizes here
        for tensor in _tensors_of(self.model, self.split_points.values()):
            dist.broadcast(tensor, src=0, group=self.mesh.everyone)

    def _names(self, pieces: list[partition.Piece]) -> tuple[str, ...]:
        return tuple(f"{self._prefix}{name}." for piece in pieces for name in piece.names)


def _tensors_of(module: nn.Module, less: Iterable[nn.Module] = ()) -> list[Tensor]:
    """A module's parameters and buffers, each once, except those of ``less``."""
    skipped = {id(tensor) for other in less for tensor in [*other.parameters(), *other.buffers()]}
    found = {id(tensor): tensor.detach() for tensor in [*module.parameters(), *module.buffers()]}
    return [tensor for key, tensor in found.items() if key not in skipped]
