"""A loop of your own, without Lightning's Trainer or Fabric: two lines more than without
communication.

torchrun --nproc-per-node=2 plain_loop.py
"""

import torch
import torch.distributed as dist
from task import Classifier, Points
from torch.utils.data import DataLoader, DistributedSampler

from lightning_dct import Updates, init_process_group


def main(epochs: int = 2) -> None:
    """Train on all ranks of a torchrun job and say what they have sent."""
    init_process_group("gloo")  # torch's, which names what keeps the ranks from starting
    torch.manual_seed(0)
    data = Points()
    model = Classifier()
    optimizer = model.configure_optimizers()
    sampler = DistributedSampler(data.train)
    batches = DataLoader(data.train, data.batch_size, sampler=sampler)
    # Instead of DistributedDataParallel.
    updates = Updates(model, optimizer, steps=epochs * len(batches))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for points, labels in batches:
            torch.nn.functional.cross_entropy(model(points), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        points, labels = data.held_out.tensors
        # The same on all ranks; each trains its own.
        with updates.shared_weights(), torch.no_grad():
            loss = torch.nn.functional.cross_entropy(model(points), labels)
        if dist.get_rank() == 0:
            ratio = updates.traffic.totals.compression_ratio
            print(
                f"epoch {epoch}: loss {loss.item():.3f}, {ratio:.0f}x fewer bytes than dense fp32"
            )
    updates.close()  # the model has the shared weights
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
