"""Asks for all that a step will receive when the step begins, so that it travels while the stage computes.

Gloo's sender keeps a message until the receiver has asked for it, and the schedules of torch.distributed.pipelining ask
when they need it. So nothing would travel while the receiver computes, and each message would take a round trip::

    asked when needed    | compute 0 | ask ─► ◄─ bytes | compute 1 | ask ─► ◄─ bytes | compute 2
    asked early          | compute 0 | compute 1 | compute 2         (bytes travel meanwhile)

The bytes, their order and the arithmetic stay the same.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage


class EarlyReceiver(PipelineStage):
    """A stage for schedules with one piece per rank, on gloo.

    With several pieces, messages both ways cross between the same two ranks, and only the schedule knows their order.
    NCCL runs the receives of a stream strictly in turn, so an early one would block what comes after it.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._asked: list[dict[int, list[dist.P2POp]]] = [{}, {}]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """What a micro-batch waits for; the first one asks for everything, in the order in which it is sent."""
        if fwd_chunk_id == 0:
            forward, backward = super().get_fwd_recv_ops, super().get_bwd_recv_ops
            self._asked = [
                {number: [_under_way(op) for op in ops(number)] for number in self.args_recv_info}
                for ops in (forward, backward)
            ]
        return self._asked[0].pop(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """What the backward of a micro-batch waits for."""
        return self._asked[1].pop(bwd_chunk_id)


def _under_way(op: dist.P2POp) -> dist.P2POp:
    """Start a receive now; when the schedule starts it, it gets the one that is under way."""
    work = op.op(op.tensor, group=op.group, tag=op.tag, group_src=op.group_peer)
    op.op = lambda *_, **__: work
    return op
