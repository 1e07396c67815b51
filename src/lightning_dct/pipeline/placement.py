"""Where the parts of one model live: which pieces this rank runs, and how the model is spread out and made whole."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch.distributed as dist
from torch import Tensor, nn

from lightning_dct.activations import SplitPoint
from lightning_dct.pipeline import partition
from lightning_dct.pipeline.gathering import to_cpu
from lightning_dct.pipeline.mesh import PipelineMesh


class Placement:
    """The pieces of a model on the ranks of a mesh; piece ``i`` lives on stage ``i % stages``.

    Args:
        model: The whole model.
        mesh: Where this rank is.
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
    def own_names(self) -> tuple[str, ...]:
        """What the names of this rank's parameters begin with."""
        return self._names(self.own)

    @property
    def foreign_names(self) -> tuple[str, ...]:
        """What the names of other ranks' parameters begin with."""
        return self._names(self.foreign)

    @property
    def own_parameters(self) -> list[nn.Parameter]:
        """The parameters that this rank trains, each once."""
        found = {id(p): p for piece in self.own for p in piece.modules.parameters() if p.requires_grad}
        return list(found.values())

    @property
    def split_points(self) -> dict[str, SplitPoint]:
        """All split points of the network, by name: every rank has them, as they tell the size of payloads."""
        children = self.network.named_children()
        return {self._prefix + name: child for name, child in children if isinstance(child, SplitPoint)}

    @property
    def own_split_points(self) -> dict[str, SplitPoint]:
        """Those whose thresholds this rank selects: they end its pieces."""
        own = {id(piece.split) for piece in self.own}
        return {name: split for name, split in self.split_points.items() if id(split) in own}

    def check_parameters(self) -> None:
        """Refuse models that no rank, or more than one, could train a part of.

        Raises:
            ValueError: With the parameter's name.
        """
        partition.check_parameters(self.model, self.network, self.pieces, self.mesh.stages)

    def spread_out(self) -> None:
        """Free what other ranks run."""
        partition.release(self.foreign)
        self.spread = True

    def without_foreign(self) -> AbstractContextManager[None]:
        """A context in which the model consists of this rank's pieces, so that it can be moved."""
        return partition.hidden(self.network, self.foreign)

    def make_whole(self) -> None:
        """Copy every piece from the rank that has trained it to the others of the pipeline. It must be on the CPU."""
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
        if any(tensor.is_meta for tensor in tensors):  # left so by a fit that failed; each rank has what it runs
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
    """A module's parameters and buffers, each once, but for those of some modules in it."""
    skipped = {id(tensor) for other in less for tensor in [*other.parameters(), *other.buffers()]}
    found = {id(tensor): tensor.detach() for tensor in [*module.parameters(), *module.buffers()]}
    return [tensor for key, tensor in found.items() if key not in skipped]
