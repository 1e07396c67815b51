"""Hands files of a checkpoint over to hosts that lack them, from hosts of the job that have them.

Without a shared disk each host has the files that its own ranks have written: that of rank 0 has
Lightning's ``x.ckpt`` and the index of embedding rows, and each has the states and the rows of its
ranks. So a host lacks ``x.ckpt``; after ranks have moved to other hosts, or with another number of
them, also the files of other ranks. One rank of each host sends or receives for all of them.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from lightning_dct.agreement import gather_objects
from lightning_dct.checkpoint import format as saved
from lightning_dct.checkpoint.files import beside
from lightning_dct.failures.waiting import say
from lightning_dct.strategy_protocols import CheckpointedRank, RankedStrategy

CHUNK_BYTES = 16 << 20
_COPY = "received"  # how the hidden copy of Lightning's file ends


class File(NamedTuple):
    """A file in the folder of a checkpoint, by its path from there, and the path at which it was
    written if known.
    """

    name: str
    written_as: str = ""


def spans_hosts(strategy: RankedStrategy) -> bool:
    """Whether the ranks of a strategy's process group are on several hosts."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return several and strategy.num_nodes > 1


@contextmanager
def received(strategy: CheckpointedRank, path: str) -> Iterator[str]:
    """Lightning's checkpoint, a file or a folder of shards: the first rank's that has one, or on
    other hosts a copy of it.

    A collective call. A copy is removed in the end, because it would pass for a checkpoint that was
    saved there. Files that ``torch.save`` has not written stay as they are, and so do folders if
    the strategy holds no shards.
    """
    if not spans_hosts(strategy):
        yield path
        return
    is_readable = strategy.holds_shards or not os.path.isdir(path)
    own = _fingerprint(path) if is_readable else ""
    found = gather_objects((strategy.node_rank, own, _contents(path) if own else []))
    source = next((rank for rank, (_, theirs, _) in enumerate(found) if theirs), None)
    firsts = {node: rank for rank, (node, _, _) in reversed(list(enumerate(found)))}
    lacking: list[int] = []
    if source is not None:
        lacking = [node for node, rank in firsts.items() if found[rank][1] != found[source][1]]
        # Ranks of the source's own host that have another file have another path: an error of
        # theirs.
        lacking = sorted(set(lacking) - {found[source][0]})
    copy = beside(path, _COPY)
    for node in lacking:
        assert source is not None
        for file in found[source][2]:
            _pass_on(strategy, path + file, copy + file, source, firsts[node])
    if lacking:
        gather_objects(None)  # other ranks of a host wait for the copy
    is_copied = strategy.node_rank in lacking
    try:
        yield copy if is_copied else path
    finally:
        if is_copied and dist.get_rank() == firsts[strategy.node_rank]:
            _remove(copy)


def places_of(
    strategy: RankedStrategy, path: str, manifest: saved.Manifest
) -> list[tuple[str, str]]:
    """The host and the path at which each rank has written its file, if there are several hosts; a
    collective call.
    """
    if not spans_hosts(strategy):
        return []
    return gather_objects((socket.gethostname(), saved.state_path(path, manifest, dist.get_rank())))


def hand_over(strategy: RankedStrategy, folder: str, wanted: Iterable[File]) -> None:
    """Bring files that ranks want into the folder of a checkpoint on their host, from whichever
    host has them.

    A collective call. What no host has stays missing: reading it gives an error that names it.
    """
    if not spans_hosts(strategy):
        return
    here = [file for file in wanted if not _exists(f"{folder}/{file.name}")]
    everyone = gather_objects((strategy.node_rank, here))
    firsts = {node: rank for rank, (node, _) in reversed(list(enumerate(everyone)))}
    files = sorted({file for _, theirs in everyone for file in theirs})
    if not files:
        return
    places = gather_objects([_place(folder, file) for file in files])
    for number, file in enumerate(files):
        source = next((rank for rank in sorted(firsts.values()) if places[rank][number]), None)
        if source is None:
            continue
        for node in sorted({node for node, theirs in everyone if file in theirs}):
            target = firsts[node]
            # A host may have it where it was written, and want it elsewhere.
            nearest = target if places[target][number] else source
            _pass_on(
                strategy, places[dist.get_rank()][number], f"{folder}/{file.name}", nearest, target
            )
    gather_objects(None)  # other ranks of a host wait for the files


def _fingerprint(path: str) -> str:
    try:
        return saved.fingerprint_of(path, compare=False) or ""
    except Exception:
        return ""  # a damaged file: whoever reads it says so


def _contents(path: str) -> list[str]:
    """The files of a folder, each as what follows the folder's path; of a file, an empty word."""
    files, place = url_to_fs(path)
    if not files.isdir(place):
        return [""]
    return sorted(name.removeprefix(place.rstrip("/")) for name in files.find(place))


def _remove(copy: str) -> None:
    """Remove a copy that :func:`received` has made."""
    _, place = url_to_fs(copy)
    shutil.rmtree(place, ignore_errors=True)
    with suppress(OSError):
        os.remove(place)


def _place(folder: str, file: File) -> str:
    """The path of a file on this host, empty if it is not here."""
    return next(
        (place for place in (f"{folder}/{file.name}", file.written_as) if place and _exists(place)),
        "",
    )


def _exists(path: str) -> bool:
    files, place = url_to_fs(path)
    return bool(files.exists(place))


def _pass_on(strategy: RankedStrategy, path: str, copy: str, source: int, target: int) -> None:
    """Copy a file of one rank to a path of another; both call this."""
    rank = dist.get_rank()
    if rank == source == target:
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        shutil.copyfile(path, copy)
    elif rank == source:
        _send(strategy, path, target)
    elif rank == target:
        _receive(strategy, copy, source)


def _send(strategy: RankedStrategy, path: str, target: int) -> None:
    files, place = url_to_fs(path)
    size = int(files.size(place))
    dist.send(_on_wire(strategy, torch.tensor([size])), target)
    with files.open(place, "rb") as file:
        while data := file.read(CHUNK_BYTES):
            dist.send(
                _on_wire(strategy, torch.frombuffer(bytearray(data), dtype=torch.uint8)), target
            )


def _receive(strategy: RankedStrategy, path: str, source: int) -> None:
    length = _on_wire(strategy, torch.zeros(1, dtype=torch.int64))
    dist.recv(length, source)
    left = int(length.item())
    name = os.path.basename(path).removeprefix(".").removesuffix(f".{_COPY}")
    if (folder := os.path.basename(os.path.dirname(path))).endswith(f".{_COPY}"):
        name = f"{folder.removeprefix('.').removesuffix(f'.{_COPY}')}/{os.path.basename(path)}"
    say(
        dist.get_rank(),
        f"this host lacks {name}, {left / 1e6:,.1f} MB, of the checkpoint: rank {source} hands it"
        " over.",
    )
    files, place = url_to_fs(path)
    if not isinstance(files, LocalFileSystem):
        raise RuntimeError(
            f"{path!r} is in a store that only some hosts reach. Let all of them reach it."
        )
    os.makedirs(os.path.dirname(place), exist_ok=True)
    unfinished = beside(place, f"{socket.gethostname()}.part")
    with open(unfinished, "wb") as file:
        while left:
            chunk = _on_wire(strategy, torch.empty(min(left, CHUNK_BYTES), dtype=torch.uint8))
            dist.recv(chunk, source)
            file.write(chunk.cpu().numpy().tobytes())
            left -= chunk.numel()
    os.replace(unfinished, place)


def _on_wire(strategy: RankedStrategy, tensor: Tensor) -> Tensor:
    """The tensor where the process group can send it."""
    return tensor.to(strategy.root_device) if dist.get_backend() == "nccl" else tensor
