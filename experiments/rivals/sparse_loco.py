"""SparseLoCo by its published rule: the largest entries of what a replica has moved, in two bits,
with feedback.
"""

import math

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_dct.traffic import FP32_BYTES, all_gather_bytes
from rivals.apart import Method, Replica

CODE_BITS = 2
_LEVELS = 2**CODE_BITS


class SparseLoCo(Method):
    """Local steps, then a sparse and quantised exchange (Sarfi et al., 2025, arXiv:2508.15706).

    Every ``sync_every`` steps, on each of R ranks:

        e  <-  decay * e + (shared - weights)          what the replica has moved, and what it has not sent
        s   =  Q(top-k of each chunk of e)             two bits a value, and the place in the chunk
        e  <-  e - s
        shared  <-  shared - outer_rate * (sum of s over ranks) / R
        weights  <-  shared

    Chunks are ``chunk`` consecutive entries of a tensor; a smaller tensor is one chunk. ``Q``
    rounds to the means of four classes: two signs, and above or below the mean size. The paper
    leaves the levels open.

    Args:
        sync_every: Steps from one exchange to the next.
        top_k: Entries that are sent of each chunk.
        chunk: Entries of a chunk.
        decay: What remains of the error in each exchange.
        outer_learning_rate: Of the outer step.
    """

    def __init__(
        self,
        sync_every: int = 30,
        top_k: int = 64,
        chunk: int = 4096,
        decay: float = 0.95,
        outer_learning_rate: float = 1.0,
    ) -> None:
        if sync_every < 1:
            raise ValueError(f"strategy.method.sync_every={sync_every}: must be at least 1")
        if not 1 <= top_k <= chunk:
            raise ValueError(
                f"strategy.method.top_k={top_k}: must be 1 to strategy.method.chunk={chunk}"
            )
        self.sync_every = sync_every
        self.top_k = top_k
        self.chunk = chunk
        self.decay = decay
        self.outer_learning_rate = outer_learning_rate
        self._step = 0
        self._payload_bytes = 0

    def attach(self, replica: Replica) -> Optimizer:
        self._replica = replica
        self._shared = [parameter.detach().clone() for parameter in replica.parameters]
        self._errors = [torch.zeros_like(parameter) for parameter in self._shared]
        replica.optimizer.register_step_post_hook(self._after_step)
        return replica.optimizer

    def their_ratio(self) -> float:
        """Bytes of the weights over those of the payload of one exchange."""
        return FP32_BYTES * sum(tensor.numel() for tensor in self._shared) / self._payload_bytes

    @torch.no_grad()
    def _after_step(self, *_: object) -> None:
        self._step += 1
        if self._step % self.sync_every:
            return
        parameters = self._replica.parameters
        ranks = self._replica.group.size()
        parts = []
        for parameter, shared, error in zip(parameters, self._shared, self._errors, strict=True):
            error.mul_(self.decay).add_(shared - parameter)
            places = largest_of_chunks(error, self.chunk, self.top_k)
            codes, levels = quantise(error.view(-1)[places])
            error.view(-1)[places] -= levels[codes]
            parts.append((places, codes, levels))
        payload = pack(parts, self.chunk)
        self._payload_bytes = payload.numel()
        received = payload.new_empty(ranks * payload.numel())
        dist.all_gather_single(received, payload, group=self._replica.group)
        entries = sum(places.numel() for places, _, _ in parts)
        self._replica.traffic.add(
            bytes_sent=all_gather_bytes(payload.numel(), ranks), entries_sent=entries
        )
        counts = [places.numel() for places, _, _ in parts]
        for one in received.split(payload.numel()):
            for shared, (places, values) in zip(
                self._shared, unpack(one, self._shared, counts, self.chunk, self.top_k), strict=True
            ):
                shared.view(-1)[places] -= self.outer_learning_rate / ranks * values
        for parameter, shared in zip(parameters, self._shared, strict=True):
            parameter.copy_(shared)


def largest_of_chunks(tensor: Tensor, chunk: int, top_k: int) -> Tensor:
    """Positions, int64 and by chunk, of the ``top_k`` largest magnitudes of each chunk; all of a
    smaller chunk.
    """
    found = []
    for number, part in enumerate(tensor.view(-1).abs().split(chunk)):
        found.append(part.topk(min(top_k, part.numel()), sorted=False).indices + number * chunk)
    return torch.cat(found)


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of values, int64 below four, and the four levels they stand for, fp32."""
    codes = 2 * (values > 0) + (values.abs() > values.abs().mean())
    counts = torch.bincount(codes, minlength=_LEVELS).clamp_(min=1)
    return codes, torch.bincount(codes, values.double(), minlength=_LEVELS).div_(counts).float()


def pack(parts: list[tuple[Tensor, Tensor, Tensor]], chunk: int) -> Tensor:
    """One payload, uint8: all levels in fp32, then of each entry its place in the chunk and its
    code, bit by bit.
    """
    levels = torch.cat([levels for _, _, levels in parts]).numpy().view(np.uint8)
    numbers = torch.cat([(places % chunk) * _LEVELS + codes for places, codes, _ in parts]).numpy()
    bits = (numbers[:, None] >> np.arange(_entry_bits(chunk))) & 1
    return torch.from_numpy(np.concatenate([levels, np.packbits(bits.astype(np.uint8))]))


def unpack(
    payload: Tensor, tensors: list[Tensor], counts: list[int], chunk: int, top_k: int
) -> list[tuple[Tensor, Tensor]]:
    """The positions and the values of each tensor."""
    levels_bytes = len(tensors) * _LEVELS * FP32_BYTES
    levels = torch.from_numpy(payload[:levels_bytes].numpy().view(np.float32)).view(-1, _LEVELS)
    width = _entry_bits(chunk)
    bits = np.unpackbits(payload[levels_bytes:].numpy(), count=sum(counts) * width).reshape(
        -1, width
    )
    numbers = torch.from_numpy(bits.astype(np.int64) @ (1 << np.arange(width)))
    found = []
    for tensor, own, of_tensor in zip(tensors, levels, numbers.split(counts), strict=True):
        sent = [min(top_k, part.numel()) for part in tensor.view(-1).split(chunk)]
        starts = torch.repeat_interleave(torch.arange(len(sent)) * chunk, torch.tensor(sent))
        found.append((starts + of_tensor // _LEVELS, own[of_tensor % _LEVELS]))
    return found


def _entry_bits(chunk: int) -> int:
    return math.ceil(math.log2(chunk)) + CODE_BITS
