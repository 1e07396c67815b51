"""What only a GPU can show, in one command: one JSON and one table, for docs/evidence/gpu.md.

    make gpu                                        # with TESTS_ON=cuda; the JSON goes to outputs/gpu.json
    TRITON_INTERPRET=1 python tests/gpu_check.py    # small sizes on a CPU, for ``test_gpu_check.py``

One card is enough: two ranks share it. A part that fails is a row of its own, and makes the exit
status 1. All others run nevertheless; ``--only`` names those that shall run. Ranks that take too
long are killed.

Over NCCL two ranks share a card from version 2.30.3 on, which ``LD_PRELOAD=libnccl.so.2`` gives to
an older torch:

    NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=4 TESTS_ON=cuda python
    tests/gpu_check.py
        --only two_ranks_over_nccl
"""

import argparse
import copy
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from interpreted import way_of
from lightning_dct import DCTConfig, Gradients, Updates
from lightning_dct.compress import codec
from lightning_dct.compress.bucket_plan import Bucket, ExchangeContext, Gain, Received, plan_bucket
from lightning_dct.compress.error_feedback import ErrorFeedback
from lightning_dct.sync.setup import make_gradient_synchronizer, make_update_synchronizer
from lightning_dct.sync.views import View
from lightning_dct.traffic import Traffic, plain_table
from one_card import DEVICE

TESTS = Path(__file__).parent
ON_A_CARD = ("compress/test_contract.py", "compress/test_contract_of_exchanges.py")
# GPT-2's 148 tensors.
LAYER = (768, 768, 768 * 2304, 2304, 768 * 768, 768, 768, 768, 768 * 3072, 3072, 3072 * 768, 768)
GPT2 = (50257 * 768, 1024 * 768, *12 * LAYER, 768, 768)
TENSORS: dict[str, dict[str, tuple[int, ...]]] = {
    "cuda": {"100 M entries": (100_000_000,), "GPT-2": GPT2, "1,000 M entries": (1_000_000_000,)},
    "cpu": {"5,000 entries": (4000, 1000)},
}
DENSITIES = (0.3, 0.1, 0.03)
SENDERS = (2, 8)
# Width, layers, vocabulary, tokens, sequences: GPT-2's 124 million, about what `experiment=lm` has,
# one for two cores.
NETWORKS = {
    "cuda": {"GPT-2": (768, 12, 50257, 512, 4), "small": (128, 2, 256, 64, 16)},
    "cpu": {"tiny": (8, 1, 10, 8, 1)},
}
STEPS = {"cuda": 24, "cpu": 1}
SETTINGS = {
    "updates, 1bit": DCTConfig(local_steps=1, warmup_steps=0, density=0.3),
    "updates, bf16": DCTConfig(local_steps=1, warmup_steps=0, density=0.1, value_format="bf16"),
    "gradients, 1bit": DCTConfig(compress="gradients", density=0.1),
    "gradients, bf16, two_phase": DCTConfig(
        compress="gradients", density=0.1, value_format="bf16", exchange="two_phase"
    ),
}
SIZES = {"cuda": (50_000, 30, 9_000), "cpu": (2500, 30, 900)}
ROUNDS = {"cuda": 4, "cpu": 2}
AT_ONCE: dict[str, Any] = {"local_steps": 1, "density": 0.1, "warmup_steps": 0}
ON_CARD: dict[str, dict[str, Any]] = {
    "updates, 1bit": AT_ONCE,
    "updates, bf16, two_phase": {**AT_ONCE, "value_format": "bf16", "exchange": "two_phase"},
    "updates, 2bit, on their way": {
        **AT_ONCE,
        "local_steps": 3,
        "overlap_steps": 2,
        "value_format": "2bit",
    },
    "gradients, 1bit": {"compress": "gradients", "density": 0.1},
}
# Other tests resume on a CPU, in all ways.
RESUMED = {"cuda": ON_CARD, "cpu": {"updates, 1bit": AT_ONCE}}
# After how many steps a run is saved, and how many it has; thresholds are selected again between.
BREAKS = {"cuda": (31, 64), "cpu": (4, 6)}
# Seconds after which ranks are killed.
LIMITS = {"gloo": 300.0, "nccl": 180.0}
Row = tuple[str, str]


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, action: Callable[[], object]) -> float:
    """Median seconds of ten calls in a row, by each call."""
    calls = 10 if device.type == "cuda" else 1

    def once() -> float:
        wait_for(device)
        start = perf_counter()
        for _ in range(calls):
            action()
        wait_for(device)
        return (perf_counter() - start) / calls

    return median(once() for _ in range(3 if device.type == "cuda" else 1))


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


# In one process


def cuda_tests(device: torch.device) -> list[Row]:
    """Those of the suite that run on a GPU where there is one."""
    if device.type == "cpu":
        return [("the suite's CUDA tests", "not on a CPU")]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:warnings",
        "-o",
        "addopts=",
        *(str(TESTS / file) for file in ON_A_CARD),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:])
    return [("the suite's CUDA tests", done.stdout.strip().splitlines()[-1])]


def graphs_of_replicas(device: torch.device) -> list[Row]:
    """Trainings of ``experiments/replicas.py`` as CUDA graphs, against the same ones without."""
    if device.type == "cpu" or find_spec("hydra") is None:
        return [
            (
                "replicas as graphs",
                "not on a CPU" if device.type == "cpu" else "hydra is not installed",
            )
        ]
    sys.path.append(str(TESTS.parent / "experiments"))
    from replicated import side_by_side
    from replicated.training import Job

    words = (
        "experiment=lm",
        "data=documentation",
        "data.context_length=32",
        "model.width=64",
        "model.num_layers=1",
    )
    words += (
        "strategy=dct",
        "strategy.warmup_steps=12",
        "strategy.refresh_every=20",
        "strategy.density=0.1",
    )
    rows = []
    for ranks, own in ((2, "strategy.local_steps=2"), (3, "strategy.exchange=two_phase")):
        found = []
        for eager in (10**9, side_by_side.EAGER):  # steps without a graph
            with mock.patch.object(side_by_side, "EAGER", eager):
                together = side_by_side.SideBySide([Job((*words, own), ranks, 200, device="cuda")])
                for _ in range(70):
                    together.step()
            torch.cuda.synchronize()
            (one,) = together.trainings
            one.look()
            found.append(hashed(*one.shared_weights().values(), together.banks[0].losses))
        rows.append(
            (
                f"replicas as graphs, {own}: bitwise as without",
                "yes" if found[0] == found[1] else "NO",
            )
        )
    return rows


def exchange_profile(device: torch.device) -> list[Row]:
    """An exchange of updates without a network: time, launches, memory, and whether the host
    waits.
    """
    rows: list[Row] = []
    for name, sizes in TENSORS[device.type].items():
        noise = torch.Generator(device).manual_seed(0)
        own = [torch.randn(size, generator=noise, device=device) for size in sizes]
        shared = [torch.zeros_like(weights) for weights in own]
        entries = sum(sizes)
        rows.append(
            (
                f"{name}: a copy",
                milliseconds(timed(device, lambda own=own: [one.clone() for one in own])),
            )
        )
        rows += rivals(device, name, own) if entries < 500_000_000 else []
        for density in DENSITIES[
            :: len(DENSITIES) if device.type == "cpu" or entries > 500_000_000 else 1
        ]:
            rows += profile(device, f"{name}, {density:.0%}", Bucket(own, shared, None), density)
        del own, shared
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def rivals(device: torch.device, name: str, own: list[Tensor]) -> list[Row]:
    """What others do with the same tensors: the largest entries, bf16, and PowerSGD's products of
    rank 4.
    """
    matrices = [
        one[: 768 * (one.numel() // 768)].view(-1, 768) for one in own if one.numel() >= 768 * 768
    ]

    def power_sgd() -> None:
        for matrix in matrices:
            left = torch.linalg.qr(matrix @ matrix.new_ones(768, 4))[0]
            _ = left @ (left.T @ matrix)

    ways: dict[str, Callable[[], object]] = {
        "torch.topk, 1%": lambda: [
            one.abs().topk(max(one.numel() // 100, 1), sorted=False) for one in own
        ],
        "to bf16 and back": lambda: [one.bfloat16().float() for one in own],
        "PowerSGD's products and QR, rank 4": power_sgd,
    }
    return [(f"{name}: {what}", milliseconds(timed(device, way))) for what, way in ways.items()]


def profile(device: torch.device, name: str, bucket: Bucket, density: float) -> list[Row]:
    sizes = [weights.numel() for weights in bucket.references]
    names = [str(number) for number in range(len(sizes))]
    entries = sum(sizes)
    plan = plan_bucket(
        names, sizes, [density] * len(sizes), torch.float32, "1bit", 16, link_traversals=2.0
    )
    feedback = ErrorFeedback({}, adapt_threshold=True, undoable=False, of_updates=True)
    sent = list[Tensor]()
    context = ExchangeContext(tag=1, gains=dict(zip(names, map(gain_of_rows, sizes), strict=True)))

    def pack() -> None:
        sent[:] = [codec.compress(feedback, bucket, plan, set(), context)[0]]

    def add(payloads: Tensor) -> None:
        # A factor that leaves the weights nearly as they are, so that each time is like the last.
        codec.apply(feedback, Received(payloads, plan, 1e-12, own=0, context=context), bucket)

    def both(payloads: Tensor) -> None:
        pack()
        add(payloads)

    with way_of("triton"):
        for _ in range(4):  # thresholds are selected, and the guard moves them
            pack()
        rows: list[Row] = []
        for senders in SENDERS:
            if entries * senders > 2_500_000_000:
                continue
            payloads = sent[0].repeat(senders, 1)
            add(payloads)
            launches, besides = watched(device, partial(both, payloads), sent[0].numel())
            packing = timed(device, pack)
            adding = timed(device, partial(add, payloads))
            times = f"{milliseconds(packing)} + {milliseconds(adding)}, {launches} launches"
            what = f"{name}: pack + add {senders} payloads"
            rows.append((what, f"{times}, {besides / entries:.2f} bytes an entry besides"))
        feedback.awaited.synchronize()
    return rows


def gain_of_rows(size: int) -> Gain:
    """The gain of a tensor of so many entries, in rows of GPT-2's width, if it can have such."""
    width = next(width for width in (768, 1000, 1) if size % width == 0)
    rows, columns = (
        torch.linspace(0.9, 1.1, count, dtype=torch.float64) for count in (size // width, width)
    )
    return Gain(rows, columns)


def watched(device: torch.device, action: Callable[[], object], payload: int) -> tuple[int, float]:
    """Kernels and copies that are launched, and memory besides the payload; the host must not wait
    meanwhile.
    """
    if device.type == "cpu":
        action()
        return 0, 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        action()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    besides = torch.cuda.max_memory_allocated(device) - before - payload
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        action()
        torch.cuda.synchronize()
    on_card = [
        one for one in profiler.events() if one.device_type == torch.autograd.DeviceType.CUDA
    ]
    return len(on_card), max(besides, 0)


# On two ranks


def on_ranks(main: Callable[..., None], limit: float, *arguments: Any) -> list[dict[str, Any]]:
    """What ``main(rank, folder, *arguments)`` has written on each of two ranks; a TimeoutError
    kills them.

    What ranks that fail have written until then is an attribute of the error: ``found``.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        ranks = mp.spawn(main, (folder, *arguments), nprocs=2, join=False)
        deadline = monotonic() + limit
        try:
            while not ranks.join(1.0, grace_period=10.0):
                if monotonic() > deadline:
                    raise TimeoutError(f"killed after {limit:.0f} s")
            return written(folder)
        except Exception as error:
            error.found = written(folder)  # type: ignore[attr-defined]
            raise
        finally:
            for process in ranks.processes:
                process.kill()


def written(folder: str) -> list[dict[str, Any]]:
    files = [Path(folder) / f"{rank}.json" for rank in range(2)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def write(found: dict[str, Any], folder: str, rank: int) -> None:
    part = Path(folder) / f"{rank}.part"
    part.write_text(json.dumps(found))
    part.replace(Path(folder) / f"{rank}.json")


def two_ranks(device: torch.device, backend: str = "gloo") -> list[Row]:
    """The same bits on both ranks, and as on the CPU's own way; then the steps of language
    models.
    """
    return compared(on_ranks(rank_main, LIMITS[backend], backend, device.type), backend)


def compared(found: list[dict[str, Any]], backend: str) -> list[Row]:
    rows = []
    for name in SETTINGS:
        if all(name in rank.get("there", {}) for rank in found):
            equal = found[0]["there"][name]["shared"] == found[1]["there"][name]["shared"]
            as_on_cpu = all(rank["there"][name] == rank["here"][name] for rank in found)
            rows.append((f"{backend}, {name}: both ranks bitwise alike", "yes" if equal else "NO"))
            rows.append((f"{backend}, {name}: bitwise as on the CPU", "yes" if as_on_cpu else "NO"))
    return rows + [(f"{backend}, {what}", text) for what, text in found[0].get("steps", [])]


def two_ranks_over_nccl(device: torch.device) -> list[Row]:
    """The same; most versions of NCCL refuse two ranks on one card."""
    if device.type == "cpu":
        return []
    version = ".".join(map(str, torch.cuda.nccl.version()))
    rows = [("NCCL, and what it is told", f"{version}, {told('NCCL_', 'CUDA_MPS_') or 'nothing'}")]
    try:
        return rows + two_ranks(device, "nccl")
    except Exception as error:
        rows += compared(getattr(error, "found", [{}, {}]), "nccl")
        # What NCCL says itself comes before torch's advice to look at its log.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = next(
            (line for line in reversed(lines) if "Error" in line),
            lines[-1] if lines else repr(error),
        )
        return [
            *rows,
            (
                "two ranks over nccl on one card",
                f"fail: {why} {lines[-1] if lines and lines[-1] != why else ''}",
            ),
        ]


def told(*prefixes: str) -> str:
    return " ".join(
        f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(prefixes)
    )


def rank_main(rank: int, folder: str, backend: str, kind: str) -> None:
    device = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
    found: dict[str, Any] = {"here": {}, "there": {}, "steps": []}
    # Over NCCL there is no collective for the tensors of the CPU's own way.
    begin_group("gloo", rank, folder)
    with way_of("numba"):
        for name, config in SETTINGS.items():
            found["here"][name] = exchanged(config, torch.device("cpu"), rank, kind)
    if backend != "gloo":
        dist.destroy_process_group()
        begin_group(backend, rank, folder)
    with way_of("triton"):
        for name, config in SETTINGS.items():
            found["there"][name] = exchanged(config, device, rank, kind)
            write(found, folder, rank)
        densities = DENSITIES if kind == "cuda" else DENSITIES[:1]
        ways: list[str | float] = ["no exchange", "no exchange, in step", "ddp", *densities]
        for network in NETWORKS[kind]:
            for way in ways:
                found["steps"].append(step_time(way, network, device, rank))
                write(found, folder, rank)
    dist.destroy_process_group()


def begin_group(backend: str, rank: int, folder: str) -> None:
    timeout = timedelta(seconds=60 if backend == "nccl" else 180)
    store = f"file://{folder}/store-{backend}"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=2, timeout=timeout)


def resumed_run(device: torch.device) -> list[Row]:
    """A run that two ranks save, and that two new processes resume, against the uninterrupted
    one.
    """
    rows = []
    # Products of matrices have one order, with this memory for them.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with tempfile.TemporaryDirectory() as saved:
        on_ranks(resuming_main, LIMITS["gloo"], device.type, saved, False)
        ranks = on_ranks(resuming_main, LIMITS["gloo"], device.type, saved, True)
    for name in RESUMED[device.type]:
        same = all(rank[name]["same"] for rank in ranks)
        whole = [rank[name]["held"] for rank in ranks]
        if whole[0] == whole[1]:
            raise RuntimeError(f"{name}: both ranks hold the same, so nothing can be lost")
        rows.append((f"resumed run, {name}: bitwise as uninterrupted", "yes" if same else "NO"))
    return rows


def resuming_main(rank: int, folder: str, kind: str, saved: str, resumes: bool) -> None:
    device = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
    begin_group("gloo", rank, folder)
    found: dict[str, Any] = {}
    # On a CPU the interpreter would take minutes.
    with way_of("triton" if kind == "cuda" else "numba"):
        for number, (name, settings) in enumerate(RESUMED[kind].items()):
            half, whole = (Path(saved) / f"{what}-{number}-{rank}.pt" for what in ("half", "whole"))
            if not resumes:
                torch.save(train(settings, device, rank, None, half), half)
                torch.save(train(settings, device, rank, None, None), whole)
                continue
            held = train(settings, device, rank, half, None)
            expected = torch.load(whole, weights_only=True)
            found[name] = {
                "same": digest(held) == digest(expected),
                "held": digest(expected["states"][1]),
            }
    write(found, folder, rank)
    dist.destroy_process_group()


def train(
    settings: dict[str, Any], device: torch.device, rank: int, load: Path | None, save: Path | None
) -> Any:
    """All steps, those until a run is saved, or those after that; gives all that a checkpoint
    holds, and all losses.
    """
    name = list(NETWORKS[device.type])[-1]
    width, layers, vocabulary, length, sequences = NETWORKS[device.type][name]
    first, last = BREAKS[device.type]
    torch.manual_seed(0 if load is None else 1)
    network = Network(width, layers, vocabulary).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=device.type == "cuda")
    compresses_updates = settings.get("compress") != "gradients"
    trained: Any = network if compresses_updates else DistributedDataParallel(network)
    settings = {"refresh_every": first // 2 + 1, **settings}
    exchange: Any = (
        Updates(network, optimizer, **settings)
        if compresses_updates
        else Gradients(trained, **settings)
    )
    losses: list[Tensor] = []
    if load is not None:
        state = torch.load(load, weights_only=True)
        for one, its in zip((network, exchange, optimizer), state["states"], strict=True):
            one.load_state_dict(its)
        losses = state["losses"]
    noise = torch.Generator().manual_seed(2 + rank)
    for step in range(last if save is None else first):
        batch = torch.randint(vocabulary, (sequences, length), generator=noise).to(device)
        if load is not None and step < first:
            continue
        optimizer.zero_grad()
        # In an order that is fixed.
        with torch.autocast(device.type, torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            loss = trained(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    with exchange.shared_weights() if compresses_updates else nullcontext():
        weights = copy.deepcopy(network.state_dict())
    state = {
        name: its
        for name, its in exchange.state_dict().items()
        if name != "traffic" or save is not None
    }
    states = copy.deepcopy([weights, state, optimizer.state_dict()])
    exchange.synchronizer.exchange.close()
    return {"states": states, "losses": losses}


def digest(tree: Any) -> str:
    """Differs when a bit does, wherever the tensors lie."""
    leaves = tree_leaves(tree)
    plain = [repr(leaf) for leaf in leaves if not isinstance(leaf, Tensor)]
    tensors = [
        leaf.contiguous().view(-1).view(torch.uint8) for leaf in leaves if isinstance(leaf, Tensor)
    ]
    return hashed(*tensors) + hashlib.sha256("".join(plain).encode()).hexdigest()


def strategy_of(config: DCTConfig, rank: int) -> Any:
    """What :mod:`lightning_dct.sync.setup` asks of a strategy."""
    place = {"node_rank": 0, "local_rank": rank, "_timeout": timedelta(minutes=3)}
    return SimpleNamespace(config=config, traffic=Traffic(), project=None, lifeline=None, **place)


def exchanged(config: DCTConfig, device: torch.device, rank: int, kind: str) -> dict[str, str]:
    """Hashes of what all ranks share, and of what this one has not sent, after rounds of the same
    random numbers.
    """
    module = nn.ParameterList(
        nn.Parameter(torch.zeros(size, device=device)) for size in SIZES[kind]
    )
    strategy = strategy_of(config, rank)
    noise = torch.Generator().manual_seed(1 + rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    if config.compress == "updates":
        synchronizer: Any = make_update_synchronizer(
            strategy, module, None, False, lambda: [optimizer]
        )
    else:
        wrapped = DistributedDataParallel(Summed(module), gradient_as_bucket_view=True)
        synchronizer = make_gradient_synchronizer(strategy, wrapped, None)
        wrapped.register_comm_hook(None, synchronizer.hook)
    for _ in range(ROUNDS[kind]):
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
        synchronizer.views.open(View.END)
        module.cpu()
        synchronizer.weights.follow_parameters()
    state = synchronizer.state_dict()
    kept = {**state["residuals"], **state.get("weights", {})}
    return {
        "shared": hashed(*(parameter.detach() for parameter in module)),
        "kept": hashed(*kept.values()),
    }


class Summed(nn.Module):
    """Its gradients are the numbers that it is given."""

    def __init__(self, parameters: nn.ParameterList) -> None:
        super().__init__()
        self.given = parameters

    def forward(self, numbers: list[Tensor]) -> Tensor:
        return sum((own * number).sum() for own, number in zip(self.given, numbers, strict=True))


def hashed(*tensors: Tensor) -> str:
    return hashlib.sha256(
        b"".join(tensor.cpu().numpy().tobytes() for tensor in tensors)
    ).hexdigest()


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


def step_time(way: str | float, name: str, device: torch.device, rank: int) -> Row:
    """A step alone, with the dense all-reduce of its gradients, or with an exchange after it; two
    ranks at once.

    Ranks that exchange wait for each other, and so share the card at each moment. "In step" they do
    that only.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    width, layers, vocabulary, length, sequences = NETWORKS[device.type][name]
    torch.manual_seed(0)
    network = Network(width, layers, vocabulary).to(device)
    batch = torch.randint(vocabulary, (sequences, length), device=device)
    trained: nn.Module = DistributedDataParallel(network) if way == "ddp" else network
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=device.type == "cuda")
    updates = None
    if isinstance(way, float):
        strategy = strategy_of(DCTConfig(warmup_steps=0, local_steps=1, density=way), rank)
        updates = make_update_synchronizer(strategy, network, None, False, lambda: [optimizer])

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
        if way == "no exchange, in step":
            wait_for(device)
            dist.barrier()

    # So that thresholds are selected, and memory is allocated.
    for _ in range(10 if device.type == "cuda" else 1):
        step()
    dist.barrier()
    wait_for(device)
    start = perf_counter()
    for _ in range(STEPS[device.type]):
        step()
    wait_for(device)
    seconds = (perf_counter() - start) / STEPS[device.type]
    if updates is not None:
        updates.flush()
        updates.exchange.close()
    entries = sum(parameter.numel() for parameter in network.parameters())
    said = f"dct, {way:.0%} after every step" if isinstance(way, float) else way
    most = (
        f", {torch.cuda.max_memory_allocated(device) / 1e9:.2f} GB at most"
        if device.type == "cuda"
        else ""
    )
    return f"{name}, {entries / 1e6:.3g} M entries, {said}", f"{1e3 * seconds:.1f} ms a step{most}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="*", default=[], help="the parts that run; all if none is named"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/gpu.json"), help="where the JSON goes"
    )
    given = parser.parse_args()
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        parser.error(
            "there is no GPU, or this build of torch has no CUDA: without TESTS_ON=cuda the command"
            " tries itself"
        )
    device = torch.device("cuda", 0) if DEVICE.type == "cuda" else DEVICE
    where = torch.cuda.get_device_name(device) if DEVICE.type == "cuda" else "a CPU"
    rows = [("device, torch", f"{where}, {torch.__version__}")]
    failed = list[str]()
    given.output.parent.mkdir(parents=True, exist_ok=True)
    for part in (
        exchange_profile,
        graphs_of_replicas,
        two_ranks,
        resumed_run,
        two_ranks_over_nccl,
        cuda_tests,
    ):
        if given.only and part.__name__ not in given.only:
            continue
        print(f"{part.__name__} ...", flush=True)
        start = perf_counter()
        found = list[Row]()
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
