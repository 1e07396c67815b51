"""Runs a rank's pieces: training under a schedule of torch.distributed.pipelining, evaluation
forward only.

With gloo all receives of a step are posted at its start. Gloo's sender keeps a message until its
receive is posted, and torch's schedules post a receive when they need the message. So nothing would
be sent while the receiver computes, and each message would take a round trip::

    posted when needed   | compute 0 | post ─► ◄─ bytes | compute 1 | post ─► ◄─ bytes | compute 2
    posted early         | compute 0 | compute 1 | compute 2         (bytes are sent meanwhile)

The bytes, their order and the arithmetic stay the same.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from lightning_dct.pipeline.borders import Border, Receive, Send
from lightning_dct.pipeline.mesh import PipelineMesh
from lightning_dct.pipeline.placement import Piece
from lightning_dct.pipeline.sequential import NetworkCall, context_of

ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b"]
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)


def check_schedule(schedule: str, stages: int, micro_batches: int) -> None:
    """Refuse numbers of micro-batches that a schedule cannot run (ValueError)."""
    if schedule == "1f1b" and micro_batches < stages:
        raise ValueError(
            f"`micro_batches={micro_batches}`: the schedule '1f1b' needs at least one micro-batch"
            f" per stage (`stages={stages}`). Use {stages} or more, or schedule='gpipe'."
        )
    if schedule == "interleaved_1f1b" and micro_batches % max(1, micro_batches // stages):
        raise ValueError(
            f"`micro_batches={micro_batches}`: the schedule 'interleaved_1f1b' needs a multiple of"
            f" `stages={stages}`. Use {stages * (micro_batches // stages)}."
        )


# The loss of a micro-batch, from its number and the last piece's result; and where a piece draws,
# from both numbers.
LossOf = Callable[[int, Any], Tensor]
Drawing = Callable[[int, int], AbstractContextManager[Any]]


class Stage(nn.Module):
    """One piece, which decodes its input and encodes its output.

    ``precision`` opens forward's context (autocast).
    """

    def __init__(self, piece: Piece, precision: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.modules_of_piece = piece.modules
        self.index = piece.index
        self._precision = precision
        # Set by the pipeline before each run.
        self.arriving: Border | None = None
        self.leaving: Border | None = None
        self.calls: Sequence[NetworkCall] = ()
        self.loss_of: LossOf | None = None
        self.drawing: Drawing

    def compute(self, micro_batch: int, payload: tuple[Tensor, ...]) -> Any:
        """The piece's result for a micro-batch; the first piece has an empty payload."""
        first, context = self.calls[micro_batch]
        value = first if self.arriving is None else Receive.apply(*payload, self.arriving)
        with self._precision(), self.drawing(micro_batch, self.index):
            return self.modules_of_piece(value, **context_of(self.modules_of_piece, context))

    def forward(self, *payload: Tensor, micro_batch: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        """One micro-batch under a schedule: the payload that leaves, or the loss from the last
        piece.

        ``micro_batch`` is its number, int64 ``[1]``.
        """
        number = int(micro_batch)
        # The next step reuses receive buffers, and autograd may keep parts of them.
        output = self.compute(
            number, tuple(part.clone() if not part.requires_grad else part for part in payload)
        )
        if self.leaving is not None:
            return Send.apply(output, self.leaving)
        assert self.loss_of is not None
        with self._precision():
            return self.loss_of(number, output)


class EarlyReceiver(PipelineStage):
    """A stage that posts all receives of a step at its start.

    For schedules with one piece per rank, on gloo.

    With several pieces, two ranks send each other messages both ways, in an order that only the
    schedule determines. NCCL runs the receives of a stream strictly in turn, so an early one would
    block what comes after it.
    """

    # Of forward and of backward, by micro-batch.
    _posted: list[dict[int, list[dist.P2POp]]]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The receives of a micro-batch; the first call posts all receives, in the order in which
        bytes are sent.
        """
        if fwd_chunk_id == 0:
            forward = super().get_fwd_recv_ops
            backward = super().get_bwd_recv_ops
            self._posted = [
                {number: [_post(op) for op in ops(number)] for number in self.args_recv_info}
                for ops in (forward, backward)
            ]
        return self._posted[0].pop(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The receives of the backward of a micro-batch."""
        return self._posted[1].pop(bwd_chunk_id)


def _post(op: dist.P2POp) -> dist.P2POp:
    """Start a receive now. When the schedule starts it, it gets the one that is under way."""
    work = op.op(op.tensor, group=op.group, tag=op.tag, group_src=op.group_peer)
    op.op = lambda *_, **__: work
    return op


@dataclass
class Pipeline:
    """The pieces and the schedule of one rank; ``precision`` opens forward's context."""

    pieces: Sequence[Piece]
    mesh: PipelineMesh
    schedule: str
    micro_batches: int
    device: torch.device
    precision: Callable[[], AbstractContextManager[Any]]

    def __post_init__(self) -> None:
        self.stages = [
            Stage(piece, self.precision)
            for piece in self.pieces[self.mesh.stage :: self.mesh.stages]
        ]
        self._schedule: Any = None
        self._layouts: Any = None

    def train(
        self,
        calls: Sequence[NetworkCall],
        borders: Sequence[Border],
        loss_of: LossOf,
        draw: Drawing,
    ) -> None:
        """Run forward and backward of all micro-batches, which adds gradients to the parameters'
        ``.grad``.

        The first piece takes the input of each call, and every piece takes the keywords that it
        names. The borders are the same for every micro-batch. Only the rank with the last piece
        uses ``loss_of``.
        """
        self._set_borders(borders)
        # Another shape changes the size of payloads. Every rank knows all layouts, so all rebuild
        # in the same step.
        layouts = [border.layout for border in borders]
        if layouts != self._layouts:
            self._schedule = self._build()
            self._layouts = layouts
        for stage in self.stages:
            stage.calls = calls
            stage.loss_of = loss_of
            stage.drawing = draw
        numbers = torch.arange(self.micro_batches)
        try:
            self._schedule.step(micro_batch=numbers, target=numbers, return_outputs=False)
        except RuntimeError as error:
            # torch wraps a stage's error in one that prints all arguments.
            raise error if error.__cause__ is None else error.__cause__ from None
        finally:
            for stage in self.stages:
                stage.calls = ()
                stage.loss_of = None

    def forward(
        self, calls: Sequence[NetworkCall], borders: Sequence[Sequence[Border]], draw: Drawing
    ) -> Any:
        """Run forward only, for micro-batches that may differ in size, with the borders of each.

        Returns:
            The list of the last piece's results, by micro-batch; None on ranks without that piece.
        """
        outputs: list[Any] = []
        sending: list[Any] = []
        kept: list[Tensor] = []  # payloads must live until they are sent
        for stage in self.stages:
            stage.calls = calls
            stage.drawing = draw
            outputs = []
            waiting = []
            for number, of_this in enumerate(borders):
                self._set_borders(of_this)
                payload: tuple[Tensor, ...] = ()
                if stage.arriving is not None:
                    payload = stage.arriving.empty(self.device)
                    for part in payload:
                        dist.recv(
                            part,
                            group=self.mesh.pipeline,
                            group_src=(stage.index - 1) % self.mesh.stages,
                        )
                outputs.append(stage.compute(number, payload))
                if stage.leaving is not None:
                    waiting += [part.detach() for part in Send.apply(outputs.pop(), stage.leaving)]
                # With several stages on a rank, two ranks send each other bytes both ways, which
                # NCCL takes strictly in turn. So this rank first receives everything, then sends.
                if len(self.stages) == 1 or number == len(borders) - 1:
                    target = (stage.index + 1) % self.mesh.stages
                    sending += [
                        dist.isend(part, group=self.mesh.pipeline, group_dst=target)
                        for part in waiting
                    ]
                    kept = kept + waiting
                    waiting = []
            stage.calls = ()
        for work in sending:
            work.wait()
        return outputs if self.stages[-1].leaving is None else None

    def _set_borders(self, borders: Sequence[Border]) -> None:
        for stage in self.stages:
            stage.arriving = borders[stage.index - 1] if stage.index > 0 else None
            stage.leaving = borders[stage.index] if stage.index < len(borders) else None

    def _build(self) -> Any:
        kind = (
            EarlyReceiver if len(self.stages) == 1 and self.device.type == "cpu" else PipelineStage
        )
        loss = torch.empty((), device="meta", requires_grad=True)
        stages = [
            kind(
                stage,
                stage.index,
                len(self.pieces),
                self.device,
                # With static shapes torch does not run the stage to find them.
                input_args=(
                    ()
                    if stage.arriving is None
                    else stage.arriving.empty("meta", requires_grad=True)
                ),
                output_args=(
                    loss
                    if stage.leaving is None
                    else stage.leaving.empty("meta", requires_grad=True)
                ),
                group=self.mesh.pipeline,
            )
            for stage in self.stages
        ]
        # The stage returns the loss itself, divided by the number of micro-batches.
        settings: dict[str, Any] = {"loss_fn": lambda output, target: output, "scale_grads": False}
        if self.schedule == "interleaved_1f1b":
            return ScheduleInterleaved1F1B(stages, self.micro_batches, **settings)  # type: ignore[arg-type]
        schedule = ScheduleGPipe if self.schedule == "gpipe" else Schedule1F1B
        return schedule(stages[0], self.micro_batches, **settings)
