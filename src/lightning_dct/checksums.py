"""Checksums of texts, of tensors, and of the files of a folder; all are CRC-32."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_dct.kernels.bits import as_bytes

LARGE = 1 << 16  # tensors of at least so many bytes are first reduced to sums
WORDS = 16  # so many sums, of 64-bit words


class CheckpointError(ValueError):
    """A checkpoint, or a file beside it, is damaged or belongs to another; the message names the
    file and the field.
    """


SUMS = "checksums.json"


def with_checksum(text: bytes) -> bytes:
    """A line with the checksum of a text, then the text."""
    return b"%08x\n" % zlib.crc32(text) + text


def without_checksum(data: bytes, name: str) -> bytes:
    """Undo :func:`with_checksum`; ``name`` names the text if it does not match its checksum, in a
    ValueError.
    """
    checksum, _, text = data.partition(b"\n")
    if checksum != b"%08x" % zlib.crc32(text):
        raise ValueError(f"{name} does not match its checksum")
    return text


def bytes_of(tensor: Tensor) -> Any:
    """A tensor's bytes, a numpy array; without a copy if they lie flat in the host's memory."""
    return as_bytes(tensor.detach().cpu()).numpy()


def checksum_of(tensor: Tensor) -> int:
    """The checksum of a tensor's bytes."""
    return zlib.crc32(bytes_of(tensor))


def checksums_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Checksums of tensors by name, nearly at the speed of their memory; those of GPUs are copied
    to the host once.
    """
    parts = [_shortened(as_bytes(tensor.detach())) for tensor in tensors.values()]
    if elsewhere := [part.device for part in parts if not part.is_cpu]:
        together = torch.cat([part.to(elsewhere[0]) for part in parts]).cpu()
        parts = list(together.split([part.numel() for part in parts]))
    return {name: zlib.crc32(bytes_of(part)) for name, part in zip(tensors, parts, strict=True)}


def _shortened(data: Tensor) -> Tensor:
    """The bytes themselves, or, if there are many, sums of their words and the bytes left over."""
    if data.numel() < LARGE:
        return data
    aligned = data if data.storage_offset() % 8 == 0 else data.clone()
    words, rest = aligned.split(
        [(whole := data.numel() // (8 * WORDS) * 8 * WORDS), data.numel() - whole]
    )
    return torch.cat([words.view(torch.int64).view(-1, WORDS).sum(1).view(torch.uint8), rest])


def check_sums(folder: Path, part: int, parts: int) -> None:
    """Compare every ``parts``-th of a folder's files, from number ``part`` on, with its checksum.

    A missing file is a FileNotFoundError, a damaged one a ValueError. A file, and a folder that
    Lightning's own strategy has saved, hold no checksums to compare with.
    """
    if not (folder / SUMS).exists():
        return
    text = without_checksum((folder / SUMS).read_bytes(), f"its file {SUMS!r}")
    for name, expected in list(json.loads(text).items())[part::parts]:
        if checksum_of_file(folder / name) != expected:
            raise ValueError(f"its file {name!r} does not match its checksum")


def checksum_of_file(path: Path) -> int:
    """The checksum of a file."""
    checksum = 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            checksum = zlib.crc32(piece, checksum)
    return checksum
