"""Averages of all weights as hivemind makes them: peers meet in a distributed hash table, and each
averages a part.
"""

import hivemind
import torch
import torch.distributed as dist
from hivemind.averaging import DecentralizedAverager
from hivemind.compression import Float16Compression, NoCompression
from torch.optim import Optimizer

from lightning_dct.traffic import FP32_BYTES, all_reduce_bytes
from rivals.apart import Method, Replica, own_address

# Its 8 bits fail with NumPy 2.4: `int()` of an array with one number.
_BITS = {"fp32": (32, NoCompression), "fp16": (16, Float16Compression)}
_PATIENCE_S = 120.0


class HivemindAveraging(Method):
    """The mean of all weights every ``sync_every`` steps (Diskin et al., 2021, arXiv:2106.10207).

    Args:
        sync_every: Steps from one average to the next.
        compression: How weights travel: ``fp32`` or ``fp16``.
    """

    def __init__(self, sync_every: int, compression: str = "fp16") -> None:
        if compression not in _BITS:
            raise ValueError(
                f"strategy.method.compression={compression!r}: choose one of {', '.join(_BITS)}"
            )
        self.sync_every = sync_every
        self.compression = compression
        self._step = 0

    def attach(self, replica: Replica) -> Optimizer:
        rank = replica.group.rank()
        ranks = replica.group.size()
        told: list[list[str]] = [[]]
        address = [f"/ip4/{own_address()}/tcp/0"]
        if rank == 0:
            self._table = hivemind.DHT(host_maddrs=address, start=True)
            told = [[str(peer) for peer in self._table.get_visible_maddrs()]]
        dist.broadcast_object_list(told, group=replica.group)
        if rank > 0:
            self._table = hivemind.DHT(host_maddrs=address, initial_peers=told[0], start=True)
        bits, compression = _BITS[self.compression]
        self._averager = DecentralizedAverager(
            [parameter.detach() for parameter in replica.parameters],
            self._table,
            start=True,
            prefix="peers",
            target_group_size=ranks,
            min_group_size=ranks,
            compression=compression(),
        )
        size = sum(parameter.numel() for parameter in replica.parameters)
        sent = all_reduce_bytes(size * bits // 8, ranks)

        def after_step(*_: object) -> None:
            self._step += 1
            if self._step % self.sync_every == 0:
                before = [parameter.detach().clone() for parameter in replica.parameters]
                met = self._averager.step(timeout=_PATIENCE_S)
                if met is None or len(met) < ranks:
                    raise RuntimeError(
                        f"hivemind averaged {len(met or ())} of {ranks} ranks in {_PATIENCE_S} s"
                    )
                # It only logs what fails in its own process.
                if all(map(torch.equal, before, replica.parameters)):
                    raise RuntimeError("hivemind's average has left all weights as they were")
                replica.traffic.add(bytes_sent=sent, entries_sent=size)

        replica.optimizer.register_step_post_hook(after_step)
        dist.barrier()
        return replica.optimizer

    def detach(self) -> None:
        dist.barrier()
        self._averager.shutdown()
        self._table.shutdown()

    def their_ratio(self) -> float:
        """The averages that are left out, times the bits that are."""
        return self.sync_every * 8 * FP32_BYTES / _BITS[self.compression][0]
