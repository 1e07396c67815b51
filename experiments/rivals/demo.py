"""DeMo as pytorch_optimizer has it: the largest cosine coefficients of the momentum, in every
step.
"""

from pytorch_optimizer.optimizer.demo import DeMo as DeMoOptimizer
from torch.optim import Optimizer

from lightning_dct.traffic import FP32_BYTES, all_gather_bytes
from rivals.apart import Method, Replica


class DeMo(Method):
    """Decoupled momentum (Peng, Quesnelle and Kingma, 2024, arXiv:2411.19870), an optimizer of its
    own.

    It takes the place of the module's optimizer, with its groups, their weight decay and their
    schedule.

    Args:
        learning_rate: Its peak rate. The steps are signs, as Lion's.
        top_k: Coefficients that are sent of each chunk.
        chunk: Edge of a chunk of a matrix, and length of one of a vector.
        decay: What remains of the momentum in each step.
    """

    def __init__(
        self, learning_rate: float = 1e-3, top_k: int = 32, chunk: int = 64, decay: float = 0.999
    ) -> None:
        self.learning_rate = learning_rate
        self.top_k = top_k
        self.chunk = chunk
        self.decay = decay

    def attach(self, replica: Replica) -> Optimizer:
        groups = [
            {"params": group["params"], "weight_decay": group["weight_decay"]}
            for group in replica.optimizer.param_groups
        ]
        self._optimizer = DeMoOptimizer(
            groups,
            lr=self.learning_rate,
            compression_decay=self.decay,
            compression_top_k=self.top_k,
            compression_chunk=self.chunk,
            process_group=replica.group,
        )
        self._dense = FP32_BYTES * sum(parameter.numel() for parameter in replica.parameters)

        def count(*_: object) -> None:
            # The optimizer counts its own payload: int64 positions and fp32 values.
            sent = all_gather_bytes(self._optimizer.data_transmit, replica.group.size())
            replica.traffic.add(bytes_sent=sent)

        self._optimizer.register_step_post_hook(count)
        return self._optimizer

    def their_ratio(self) -> float:
        """Bytes of the gradient over those of a rank's payload."""
        return self._dense / self._optimizer.data_transmit
