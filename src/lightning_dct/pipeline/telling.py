"""The loss and the logs of a step, which the last stage tells the others: they ask for them before the step.

A broadcast of an object sends its size, then the object, and each only when the receiver asks: two round trips at the
end of every step. Here the object arrives while the others still compute, if it is not longer than that of the step
before. What is longer follows in a broadcast.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dct.pipeline.mesh import PipelineMesh

_LENGTH = 8  # bytes, in front of every object
_GRAIN = 64  # bytes; lengths vary a little, and are rounded up to this


class Telling:
    """One object per step, from the last stage of a pipeline to the others."""

    def __init__(self, mesh: PipelineMesh) -> None:
        self._mesh = mesh
        # Bytes of the object of the step before, the same on every rank.
        self._room = 0
        self._asked: tuple[Tensor, dist.Work | None] | None = None

    def ask(self) -> None:
        """Ask for the object of this step; the last stage has nothing to ask for."""
        if not self._mesh.is_last:
            frame = torch.empty(_LENGTH + self._room, dtype=torch.uint8)
            source = self._mesh.rank_of(self._mesh.stages - 1)
            self._asked = frame, dist.irecv(frame, src=source, group=self._mesh.control)

    def share(self, value: Any) -> Any:
        """Give the last stage's object, picklable and with tensors on the CPU, to every stage."""
        data = self._send(pickle.dumps(value)) if self._mesh.is_last else self._receive()
        self._room = -(-len(data) // _GRAIN) * _GRAIN
        return value if self._mesh.is_last else pickle.loads(data)

    def _send(self, data: bytes) -> bytes:
        begun = data[: self._room].ljust(self._room, b"\0")
        frame = torch.frombuffer(bytearray(len(data).to_bytes(_LENGTH, "little") + begun), dtype=torch.uint8)
        others = range(self._mesh.stages - 1)
        sending = [dist.isend(frame, dst=self._mesh.rank_of(stage), group=self._mesh.control) for stage in others]
        if len(data) > self._room:
            rest = torch.frombuffer(bytearray(data[self._room :]), dtype=torch.uint8)
            self._mesh.broadcast(rest, self._mesh.stages - 1)
        for work in sending:
            assert work is not None
            work.wait()
        return data

    def _receive(self) -> bytes:
        assert self._asked is not None
        (frame, work), self._asked = self._asked, None
        assert work is not None
        work.wait()
        told = frame.numpy().tobytes()
        length = int.from_bytes(told[:_LENGTH], "little")
        data = told[_LENGTH : _LENGTH + length]
        if length > self._room:
            rest = torch.empty(length - self._room, dtype=torch.uint8)
            self._mesh.broadcast(rest, self._mesh.stages - 1)
            data += rest.numpy().tobytes()
        return data
