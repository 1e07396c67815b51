"""Runs the pieces of a rank under a schedule of torch.distributed.pipelining, and forward alone for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from lightning_dct.pipeline.borders import Border, Crossing, receive, send
from lightning_dct.pipeline.mesh import PipelineMesh
from lightning_dct.pipeline.placement import Piece
from lightning_dct.pipeline.receiving import EarlyReceiver
from lightning_dct.pipeline.sequential import NetworkCall, context_of

ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b"]
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)

# Makes the loss of a micro-batch from what the last piece returns for it.
LossOf = Callable[[int, Any], Tensor]


class Stage(nn.Module):
    """One piece with its two ends: it decodes what arrives and encodes what leaves.

    ``precision`` opens the context of forward (autocast).
    """

    def __init__(self, piece: Piece, precision: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.modules_of_piece = piece.modules
        self.index = piece.index
        self._precision = precision
        # Set by the pipeline before each run.
        self.arriving: Crossing | None = None
        self.leaving: Crossing | None = None
        self.calls: Sequence[NetworkCall] = ()
        self.loss_of: LossOf | None = None

    def compute(self, micro_batch: int, payload: tuple[Tensor, ...]) -> Any:
        """The piece's result for a micro-batch; the first piece has an empty payload."""
        first, context = self.calls[micro_batch]
        value = first if self.arriving is None else receive(self.arriving, *payload)
        with self._precision():
            return self.modules_of_piece(value, **context_of(self.modules_of_piece, context))

    def forward(self, *payload: Tensor, micro_batch: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        """One micro-batch under a schedule: the payload that leaves, or the loss from the last piece.

        ``micro_batch`` is its number, int64 ``[1]``.
        """
        number = int(micro_batch)
        # The next step reuses receive buffers, and what autograd keeps of them must not change.
        output = self.compute(number, tuple(part.clone() if not part.requires_grad else part for part in payload))
        if self.leaving is not None:
            return send(self.leaving, output)
        assert self.loss_of is not None
        with self._precision():
            return self.loss_of(number, output)


class Pipeline:
    """The pieces that one rank runs, of all pieces, and their schedule; ``precision`` opens the context of forward."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        mesh: PipelineMesh,
        schedule: str,
        micro_batches: int,
        device: torch.device,
        precision: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.pieces = pieces
        self.stages = [Stage(piece, precision) for piece in pieces[mesh.stage :: mesh.stages]]
        self.mesh = mesh
        self.micro_batches = micro_batches
        self.device = device
        self.precision = precision
        self._schedule_name = schedule
        self._schedule: Any = None
        self._layouts: Any = None

    def train(self, calls: Sequence[NetworkCall], borders: Sequence[Border], loss_of: LossOf) -> None:
        """Run forward and backward of all micro-batches, which adds gradients to the parameters' ``.grad``.

        The first piece takes the input of each of the network's ``calls``, and every piece the keywords that it names.
        The ``borders`` are the same for every micro-batch. ``loss_of`` is used where the last piece is.
        """
        crossings = self._cross(borders)
        # Other shapes make payloads of other sizes. Every rank knows the layouts of all borders, so all rebuild in the
        # same step.
        layouts = tuple(crossing.layout for crossing in crossings)
        if layouts != self._layouts:
            self._schedule, self._layouts = self._build(crossings), layouts
        for stage in self.stages:
            stage.calls, stage.loss_of = calls, loss_of
        numbers = torch.arange(self.micro_batches)
        try:
            self._schedule.step(micro_batch=numbers, target=numbers, return_outputs=False)
        except RuntimeError as error:
            # torch wraps what a stage raises, once with all its arguments.
            raise error if error.__cause__ is None else error.__cause__ from None
        finally:
            for stage in self.stages:
                stage.calls, stage.loss_of = (), None

    def forward(self, calls: Sequence[NetworkCall], borders: Sequence[Sequence[Border]]) -> list[Any] | None:
        """Run forward alone, for micro-batches that may differ in size, with the borders of each.

        Returns:
            The last piece's result for each micro-batch; None where that piece is not.
        """
        outputs: list[Any] = []
        sending: list[dist.Work] = []
        kept: list[Tensor] = []  # keeps payloads alive until they are sent
        for stage in self.stages:
            stage.calls, outputs, waiting = calls, [], []
            for number, of_this in enumerate(borders):
                crossings = self._cross(of_this)
                payload = () if stage.arriving is None else self._receive(stage.index, crossings[stage.index - 1])
                outputs.append(stage.compute(number, payload))
                if stage.leaving is not None:
                    waiting += [part.detach() for part in send(stage.leaving, outputs.pop())]
                # With several stages on a rank, bytes cross both ways between two ranks, and NCCL takes them strictly
                # in turn: this rank first receives everything, then sends.
                if len(self.stages) == 1 or number == len(borders) - 1:
                    sending += [self._send(stage.index, part) for part in waiting]
                    kept, waiting = kept + waiting, []
            stage.calls = ()
        for work in sending:
            work.wait()
        return outputs if self.stages[-1].leaving is None else None

    def _receive(self, index: int, crossing: Crossing) -> tuple[Tensor, Tensor]:
        payload = crossing.empty(self.device)
        for part in payload:
            dist.recv(part, src=self.mesh.rank_of((index - 1) % self.mesh.stages), group=self.mesh.pipeline)
        return payload

    def _send(self, index: int, part: Tensor) -> dist.Work:
        target = self.mesh.rank_of((index + 1) % self.mesh.stages)
        work = dist.isend(part, dst=target, group=self.mesh.pipeline)
        assert work is not None
        return work

    def _cross(self, borders: Sequence[Border]) -> list[Crossing]:
        """Set what arrives at every stage and what leaves it."""
        crossings = []
        for piece, border in zip(self.pieces, borders, strict=False):
            assert piece.split is not None
            crossings.append(Crossing(piece.split, border))
        for stage in self.stages:
            stage.arriving = crossings[stage.index - 1] if stage.index > 0 else None
            stage.leaving = crossings[stage.index] if stage.index < len(crossings) else None
        return crossings

    def _build(self, crossings: Sequence[Crossing]) -> Any:
        kind = EarlyReceiver if len(self.stages) == 1 and self.device.type == "cpu" else PipelineStage
        stages = []
        for stage in self.stages:
            loss = torch.empty((), device="meta", requires_grad=True)
            stages.append(
                kind(
                    stage,
                    stage.index,
                    len(self.pieces),
                    self.device,
                    # Static shapes: torch then never runs a stage to find them.
                    input_args=() if stage.arriving is None else stage.arriving.empty("meta", requires_grad=True),
                    output_args=loss if stage.leaving is None else stage.leaving.empty("meta", requires_grad=True),
                    group=self.mesh.pipeline,
                )
            )
        # Losses are divided by the number of micro-batches already, so torch must not scale gradients.
        settings: dict[str, Any] = {"loss_fn": _already_a_loss, "scale_grads": False}
        if self._schedule_name == "interleaved_1f1b":
            return ScheduleInterleaved1F1B(stages, self.micro_batches, **settings)  # type: ignore[arg-type]
        schedule = ScheduleGPipe if self._schedule_name == "gpipe" else Schedule1F1B
        return schedule(stages[0], self.micro_batches, **settings)


def _already_a_loss(output: Tensor, target: Tensor) -> Tensor:
    """The last stage returns the loss itself, because it has the micro-batch and its output."""
    return output
