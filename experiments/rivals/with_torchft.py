"""LocalSGD, DiLoCo and Streaming DiLoCo as torchft has them, each rank a replica group of its
own.
"""

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.optim import Optimizer
from torchft._torchft import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from lightning_dct.traffic import Traffic, all_reduce_bytes
from rivals.apart import Method, Replica, in_fragments, own_address

# A validation may lie between two exchanges.
_PATIENCE = timedelta(minutes=10)


class CountedGloo(ProcessGroupGloo):
    """torchft's process group, with a count of what it is asked to all-reduce."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__(timeout=_PATIENCE)
        self._traffic = traffic

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        size = sum(tensor.nbytes for tensor in tensors)
        entries = sum(tensor.numel() for tensor in tensors)
        self._traffic.add(bytes_sent=all_reduce_bytes(size, self.size()), entries_sent=entries)
        return super().allreduce(tensors, opts)


class _Managed(Method):
    """A method that a torchft Manager runs; rank 0 also runs the lighthouse, where replica groups
    find each other.
    """

    def __init__(self, sync_every: int) -> None:
        if sync_every < 1:
            raise ValueError(f"strategy.method.sync_every={sync_every}: must be at least 1")
        self.sync_every = sync_every

    def their_ratio(self) -> float:
        """The exchanges that are left out: every ``sync_every`` steps instead of each."""
        return float(self.sync_every)

    def attach(self, replica: Replica) -> Optimizer:
        self._manager = replica.manager or self._join(replica)
        self._algorithm = self._start(self._manager, replica)
        self._algorithm.__enter__()
        return replica.optimizer

    def _join(self, replica: Replica) -> Manager:
        """Meet the other ranks at a lighthouse."""
        rank = replica.group.rank()
        ranks = replica.group.size()
        here = own_address()
        told: list[str | None] = [None]
        self._lighthouse = None
        if rank == 0:
            self._lighthouse = LighthouseServer(bind="[::]:0", min_replicas=ranks)
            told = [f"http://{here}:{self._lighthouse.address().rsplit(':', 1)[1]}"]
        dist.broadcast_object_list(told, group=replica.group)
        self._store = TCPStore(here, 0, is_master=True, wait_for_workers=False)
        return Manager(
            pg=CountedGloo(replica.traffic),
            # No rank joins later, so none needs the weights of another.
            load_state_dict=None,
            state_dict=None,
            min_replica_size=ranks,
            use_async_quorum=False,
            timeout=_PATIENCE,
            quorum_timeout=_PATIENCE,
            rank=0,
            world_size=1,
            store_addr=here,
            store_port=self._store.port,
            lighthouse_addr=told[0],
            replica_id=f"rank_{rank}",
            hostname=here,
            init_sync=False,
        )

    def detach(self) -> None:
        self._algorithm.__exit__(None, None, None)
        dist.barrier()
        self._manager.shutdown(wait=False)
        if self._lighthouse is not None:
            self._lighthouse.shutdown()

    def _start(self, manager: Manager, replica: Replica) -> AbstractContextManager[Any]:
        raise NotImplementedError


class TorchftLocalSGD(_Managed):
    """The mean of all weights every ``sync_every`` steps (Stich, 2019, arXiv:1805.09767)."""

    def _start(self, manager: Manager, replica: Replica) -> AbstractContextManager[Any]:
        return LocalSGD(manager, replica.module, replica.optimizer, self.sync_every)


class TorchftDiLoCo(_Managed):
    """An outer step of SGD with Nesterov's momentum on the mean of what replicas have moved.

    Douillard et al., 2023, arXiv:2311.08105. With ``fragments``, Streaming DiLoCo
    (arXiv:2501.18512): parts of the model take turns, each once in ``sync_every`` steps, and travel
    for ``delay`` steps.

    Args:
        sync_every: Steps from one exchange of an entry to the next.
        outer_learning_rate: Of the outer SGD.
        outer_momentum: Nesterov's.
        fragments: Parts that take turns.
        delay: Steps that an exchange may travel.
        mixing: Share of the replica's own weights that stays after an exchange, in [0, 1].
    """

    def __init__(
        self,
        sync_every: int,
        outer_learning_rate: float = 0.7,
        outer_momentum: float = 0.9,
        fragments: int = 1,
        delay: int = 0,
        mixing: float = 0.0,
    ) -> None:
        super().__init__(sync_every)
        self.outer_learning_rate = outer_learning_rate
        self.outer_momentum = outer_momentum
        self.fragments = fragments
        self.delay = delay
        self.mixing = mixing

    def _start(self, manager: Manager, replica: Replica) -> AbstractContextManager[Any]:
        parts = in_fragments(list(replica.module.network.children()), self.fragments)
        outer = [
            torch.optim.SGD(
                part.parameters(),
                self.outer_learning_rate,
                self.outer_momentum,
                nesterov=self.outer_momentum > 0,
            )
            for part in parts
        ]
        settings = {"fragment_sync_delay": self.delay, "fragment_update_alpha": self.mixing}
        return DiLoCo(manager, parts, replica.optimizer, outer, self.sync_every, **settings)
