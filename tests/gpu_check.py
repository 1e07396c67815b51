"""What nobody has seen on a GPU yet, in one command: one JSON and one table, for docs/evidence/.

    make gpu                                  # the JSON goes to outputs/gpu.json
    python tests/gpu_check.py --device cpu    # small sizes, for ``test_gpu_check.py``

One card is enough: two ranks share it. A part that fails is a row of its own, and makes the exit status 1. All others
run nevertheless.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dct import DCTConfig
from lightning_dct.compress import on_host
from lightning_dct.compress.awaited import WITHOUT_WAITING
from lightning_dct.compress.bucket_plan import Bucket, Received, plan_bucket
from lightning_dct.compress.memory import Memory
from lightning_dct.cost.timing import wait_for
from lightning_dct.sync import rounds
from lightning_dct.sync.setup import make_gradient_synchronizer, make_update_synchronizer
from lightning_dct.tables import plain_table
from lightning_dct.traffic import Traffic

TESTS = Path(__file__).parent
# Of these, each compares what a card does with what a CPU does.
ON_A_CARD = (
    "compress/test_marking.py",
    "compress/test_on_device.py",
    "compress/test_updates_on_device.py",
    "wire/test_payload_on_device.py",
)
ENTRIES = {"cuda": (10_000_000, 100_000_000, 1_000_000_000), "cpu": (100_000,)}
# Width, layers, vocabulary, tokens, sequences: GPT-2's 124 million, and one for two cores.
NETWORK = {"cuda": (768, 12, 50257, 512, 4), "cpu": (32, 1, 100, 16, 2)}
STEPS = {"cuda": 24, "cpu": 8}
SETTINGS = {
    "updates, 1bit": DCTConfig(local_steps=1, warmup_steps=0, density=0.3),
    "updates, bf16": DCTConfig(local_steps=1, warmup_steps=0, density=0.1, value_format="bf16"),
    "gradients, 1bit": DCTConfig(compress="gradients", density=0.1),
    "gradients, bf16, sharded": DCTConfig(compress="gradients", density=0.1, value_format="bf16", exchange="sharded"),
}
ROUNDS = 4
Row = tuple[str, str]


@contextmanager
def without_waiting(device: torch.device) -> Iterator[None]:
    """The code for GPUs, on a CPU too."""
    before = set(WITHOUT_WAITING)
    WITHOUT_WAITING.add(device.type)
    try:
        yield
    finally:
        WITHOUT_WAITING.clear()
        WITHOUT_WAITING.update(before)


def timed(device: torch.device, action: Callable[[], object], times: int = 3) -> float:
    """Median seconds."""

    def once() -> float:
        wait_for(device)
        start = perf_counter()
        action()
        wait_for(device)
        return perf_counter() - start

    return median(once() for _ in range(times))


def gigabytes(device: torch.device) -> str:
    return f"{torch.cuda.max_memory_allocated(device) / 1e9:.2f} GB at most" if device.type == "cuda" else "no figure"


# In one process


class Counting(TorchDispatchMode):
    """Operations that the host starts, views and new memory not counted."""

    started = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.started += not func.is_view and not func._schema.name.startswith(("aten::empty", "aten::new_empty"))
        return func(*args, **(kwargs or {}))


def cuda_tests(device: torch.device) -> list[Row]:
    """Those of the suite that run on a GPU where there is one."""
    if device.type == "cpu":
        return [("the suite's CUDA tests", "not on a CPU")]
    command = [sys.executable, "-m", "pytest", "-p", "no:warnings", *(str(TESTS / file) for file in ON_A_CARD)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TESTS_ON": "cuda"}, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:])
    return [("the suite's CUDA tests", done.stdout.strip().splitlines()[-1])]


def exchange_profile(device: torch.device) -> list[Row]:
    """Compressing one tensor and reading two payloads: time, bytes, operations, memory, and whether the host waits."""
    rows = []
    for size in ENTRIES[device.type]:
        try:
            rows += profile(device, size)
        except torch.cuda.OutOfMemoryError as error:
            rows.append((f"{size:,} entries", f"out of memory: {str(error).splitlines()[0]}"))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def profile(device: torch.device, size: int) -> list[Row]:
    noise = torch.Generator(device).manual_seed(0)
    gradient, residual = (torch.randn(size, generator=noise, device=device) for _ in range(2))
    plan = plan_bucket(["entries"], [size], [0.3], torch.float32, "1bit", 16, link_traversals=2.0)
    memory, sent = Memory({}, guard=True, undoable=False), list[Tensor]()

    def compress() -> None:
        bucket = Bucket([gradient], [residual], 1.0)
        sent[:] = [on_host.compress(memory, bucket, plan, set()).payload]

    def read() -> None:
        on_host.decompress(memory, Received(torch.stack(sent * 2), plan, 0.5, own=0), gradient)

    copied = 8 * size / timed(device, gradient.clone)
    with without_waiting(device):
        # The first time selects the threshold and copies what is the same in every step.
        compress(), read()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            torch.cuda.set_sync_debug_mode("error")
        try:
            with Counting() as packing:
                compress()
            with Counting() as reading:
                read()
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        waits, extra = "not known on a CPU", ""
        if device.type == "cuda":
            waits = "the host waits for nothing"
            extra = f", {(torch.cuda.max_memory_allocated(device) - before) / size:.2f} bytes an entry besides"
        seconds = timed(device, compress), timed(device, read)
    memory.awaited.synchronize()
    # Compressing reads the gradient and the residual, and writes the residual.
    rate = 12 * size / seconds[0]
    return [
        (f"{size:,} entries: compress", f"{1e3 * seconds[0]:.2f} ms, {packing.started} operations, {waits}{extra}"),
        (f"{size:,} entries: of the memory's rate", f"{rate / 1e9:,.1f} of {copied / 1e9:,.1f} GB/s"),
        (f"{size:,} entries: read two payloads", f"{1e3 * seconds[1]:.2f} ms, {reading.started} operations"),
    ]


# On two ranks


def two_ranks(device: torch.device, backend: str = "gloo") -> list[Row]:
    """The same bits on both ranks, and as on the CPU's own way; then the steps of a language model."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (backend, device.type, folder), nprocs=2)
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]
    for name in SETTINGS:
        equal = found[0]["there"][name]["shared"] == found[1]["there"][name]["shared"]
        as_on_cpu = all(rank["there"][name] == rank["here"][name] for rank in found)
        rows.append((f"{backend}, {name}: both ranks bitwise alike", "yes" if equal else "NO"))
        rows.append((f"{backend}, {name}: bitwise as on the CPU", "yes" if as_on_cpu else "NO"))
    return rows + [(f"{backend}, {what}", text) for what, text in found[0]["steps"]]


def two_ranks_over_nccl(device: torch.device) -> list[Row]:
    """The same; most versions of NCCL refuse two ranks on one card."""
    if device.type == "cpu":
        return []
    try:
        return two_ranks(device, "nccl")
    except Exception as error:
        return [("two ranks over nccl on one card", f"do not start: {str(error).strip().splitlines()[-1]}")]


def rank_main(rank: int, backend: str, kind: str, folder: str) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    device = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
    store, timeout = f"file://{folder}/store", timedelta(minutes=3)
    # Over NCCL there is no collective for the tensors of the CPU's own way.
    both = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
    dist.init_process_group(both, init_method=store, rank=rank, world_size=2, timeout=timeout)
    here = {name: exchanged(config, torch.device("cpu"), rank) for name, config in SETTINGS.items()}
    with without_waiting(device):
        there = {name: exchanged(config, device, rank) for name, config in SETTINGS.items()}
        steps = [step_time(way, device, rank) for way in ("no exchange", "ddp", "dct")]
        # A bucket takes a hundred operations: fewer, larger ones may be faster, for more memory.
        for millions in (4, 16):
            with patch.object(rounds, "LARGEST_BUCKET", millions << 20):
                what, figures = step_time("dct", device, rank)
            steps.append((f"{what}, buckets of {millions} million", figures))
    (Path(folder) / f"{rank}.json").write_text(json.dumps({"here": here, "there": there, "steps": steps}))
    dist.destroy_process_group()


def strategy_of(config: DCTConfig, rank: int) -> Any:
    """What :mod:`lightning_dct.sync.setup` asks of a strategy."""
    place = {"node_rank": 0, "local_rank": rank, "_timeout": timedelta(minutes=3)}
    return SimpleNamespace(config=config, traffic=Traffic(), optimizers=[], **place)


def exchanged(config: DCTConfig, device: torch.device, rank: int) -> dict[str, str]:
    """Hashes of what all ranks share, and of what this one has not sent, after rounds of the same random numbers."""
    module = nn.ParameterList(nn.Parameter(torch.zeros(size, device=device)) for size in (50_000, 30, 9_000))
    strategy, noise = strategy_of(config, rank), torch.Generator().manual_seed(1 + rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    strategy.optimizers.append(optimizer)
    if config.compress == "updates":
        synchronizer: Any = make_update_synchronizer(strategy, module, None, exchanges_buffers=False)
    else:
        wrapped = DistributedDataParallel(Summed(module), gradient_as_bucket_view=True)
        synchronizer = make_gradient_synchronizer(strategy, wrapped, None)
        wrapped.register_comm_hook(None, synchronizer.hook)
    for _ in range(ROUNDS):
        numbers = [torch.randn(parameter.shape, generator=noise).to(device) for parameter in module]
        if config.compress == "updates":
            synchronizer.before_step(optimizer)
            for parameter, number in zip(module, numbers, strict=True):
                parameter.data.add_(number)
            synchronizer.after_step(optimizer)
        else:
            optimizer.zero_grad()
            wrapped(numbers).backward()
            optimizer.step()
    synchronizer.exchange.close()
    if config.compress == "updates":
        # As at the end of fit, after which a checkpoint may be saved.
        synchronizer.weights.show()
        module.cpu()
        synchronizer.weights.follow_parameters()
    state = synchronizer.state_dict()
    kept = {**state["residuals"], **state.get("weights", {})}
    return {"shared": hashed(*(parameter.detach() for parameter in module)), "kept": hashed(*kept.values())}


class Summed(nn.Module):
    """Its gradients are the numbers that it is given."""

    def __init__(self, parameters: nn.ParameterList) -> None:
        super().__init__()
        self.given = parameters

    def forward(self, numbers: list[Tensor]) -> Tensor:
        return sum((own * number).sum() for own, number in zip(self.given, numbers, strict=True))


def hashed(*tensors: Tensor) -> str:
    return hashlib.sha256(b"".join(tensor.cpu().numpy().tobytes() for tensor in tensors)).hexdigest()


class Network(nn.Module):
    """A decoder of GPT-2's shape, whose embedding is also its head."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        logits = self.layers(self.tokens(tokens), mask=mask, is_causal=True) @ self.tokens.weight.T
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def step_time(way: str, device: torch.device, rank: int) -> Row:
    """A step alone, with the dense all-reduce of its gradients, or with the default exchange; two ranks at once."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    width, layers, vocabulary, length, sequences = NETWORK[device.type]
    torch.manual_seed(0)
    network = Network(width, layers, vocabulary).to(device)
    batch = torch.randint(vocabulary, (sequences, length), device=device)
    trained: nn.Module = DistributedDataParallel(network) if way == "ddp" else network
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    strategy = strategy_of(DCTConfig(warmup_steps=0), rank)
    strategy.optimizers.append(optimizer)
    updates = make_update_synchronizer(strategy, network, None, exchanges_buffers=False) if way == "dct" else None

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = trained(batch)
        loss.backward()
        if updates is not None:
            updates.before_step(optimizer)
        optimizer.step()
        if updates is not None:
            updates.after_step(optimizer)

    for _ in range(8):  # so that thresholds are selected, and memory is allocated
        step()
    dist.barrier()
    seconds = timed(device, lambda: [step() for _ in range(STEPS[device.type])], times=1) / STEPS[device.type]
    if updates is not None:
        updates.flush()
        updates.exchange.close()
    entries = sum(parameter.numel() for parameter in network.parameters())
    return f"{entries / 1e6:.3g}M entries, {way}", f"{1e3 * seconds:.1f} ms a step, {gigabytes(device)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, default=Path("outputs/gpu.json"), help="where the JSON goes")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU, or this build of torch has no CUDA: `--device cpu` tries the command itself")
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    where = torch.cuda.get_device_name(device) if given.device == "cuda" else "a CPU"
    rows, failed = [("device, torch", f"{where}, {torch.__version__}")], list[str]()
    given.output.parent.mkdir(parents=True, exist_ok=True)
    for part in (exchange_profile, two_ranks, two_ranks_over_nccl, cuda_tests):
        print(f"{part.__name__} ...", flush=True)
        start, found = perf_counter(), list[Row]()
        try:
            found = part(device)
        except Exception as error:
            traceback.print_exc()
            failed.append(part.__name__)
            found = [(part.__name__, f"FAILED: {str(error).strip().splitlines()[-1]}")]
        rows += [*found, (f"{part.__name__} took", f"{perf_counter() - start:.0f} s")]
        failed += [what for what, text in found if text == "NO"]
        # After every part, because a later one may hang.
        given.output.write_text(json.dumps({"rows": dict(rows), "failed": failed}, indent=1))
    print(plain_table([["what", "found"], *map(list, rows)]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
