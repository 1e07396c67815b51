"""Packs and adds 100 million entries and, with ``gpt2``, GPT-2's tensors: ``time_kernels.py NAME [gpt2]``.

With ``PYTHONPATH`` at an older ``src`` it measures that, for two versions side by side on one card.
"""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
import gpu_check
from lightning_dct.compress.bucket_plan import Bucket

device = torch.device("cuda", 0)
for what in ("100 M entries", "GPT-2")[: 1 + ("gpt2" in sys.argv)]:
    noise = torch.Generator(device).manual_seed(0)
    own = [torch.randn(size, generator=noise, device=device) for size in gpu_check.TENSORS["cuda"][what]]
    shared = [torch.zeros_like(weights) for weights in own]
    for density in gpu_check.DENSITIES:
        for row in gpu_check.profile(
            device, f"{sys.argv[1]}, {what}, {density:.0%}", Bucket(own, shared, None), density
        ):
            print(*row, flush=True)
