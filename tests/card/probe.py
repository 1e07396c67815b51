"""Whether two ranks on one card can do NCCL's collectives in this environment: ``probe.py RANK``,
twice.
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

backend = os.environ.get("PROBE", "nccl")
device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
rank = int(sys.argv[1])
begun = time.time()
dist.init_process_group(
    backend,
    init_method=f"file://{os.environ['PROBE_STORE']}",
    rank=rank,
    world_size=2,
    timeout=timedelta(seconds=30),
)
number = torch.full((1000,), rank + 1.0, device=device)
dist.all_reduce(number)
rows = torch.empty(2, 1000, dtype=torch.uint8, device=device)
dist.all_gather_into_tensor(
    rows.view(-1), torch.full((1000,), rank, dtype=torch.uint8, device=device)
)
parts = torch.empty(10, dtype=torch.uint8, device=device)
dist.all_to_all_single(
    parts, torch.full((10,), rank, dtype=torch.uint8, device=device), [5, 5], [5, 5]
)
again = dist.new_group([0, 1], backend=backend)
dist.all_reduce(number, group=again)
assert [int(number[0]), int(rows[1, 0]), int(parts[9])] == [6, 1, 1]
start = time.time()
for _ in range(20):
    dist.all_reduce(number)
number.sum().item()
if rank == 0:
    each = (time.time() - start) / 20 * 1e3
    took = f"after {time.time() - begun:.0f} s; {each:.2f} ms for all_reduce of 4 kB"
    print("two ranks reduce, gather and swap on one card", took, flush=True)
dist.barrier()
os._exit(0)
