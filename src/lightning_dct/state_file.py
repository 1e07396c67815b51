"""Reads the files of a checkpoint, and refuses one that is corrupt, was changed or is another."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.load import _METADATA_FILENAME
from torch import Tensor

from lightning_dct.traffic import TrafficTotals

# How a file of `torch.save` begins.
_ZIP = b"PK\x03\x04"
# File names have twelve digits for a number of steps.
MORE_THAN_ANY_COUNT = 10**12


class CheckpointError(ValueError):
    """A checkpoint, or a file beside it, is damaged or belongs to another; the message names the file and the field."""


def read_checked(
    checkpoint_io: CheckpointIO, file: str, identity: Mapping[str, int | str], fingerprint: str = ""
) -> dict[str, Any]:
    """Read a rank's compression state, from a file of this identity. Only tensors and plain data are unpickled.

    ``fingerprint`` is what :func:`fingerprint_of` returned when the file was written; empty if nothing is known.

    Raises:
        OSError: The file is missing, or may not be read.
        CheckpointError: The file is corrupt, was changed, is something else, or belongs to another rank or save.
    """
    try:
        found = fingerprint_of(file, compare=True)
        state = checkpoint_io.load_checkpoint(file, weights_only=True)
        check_state(state)
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:
        # zipfile, pickle and torch raise many kinds of errors on a corrupt file.
        raise CheckpointError(
            f"The file {file!r}, one rank's part of a checkpoint, is damaged or is something else ({error}). Restore it"
            " from a copy, or resume from an earlier checkpoint."
        ) from error
    says = {**state.pop("identity", {}), "synchronisations": state["synchronisations"]}
    for field, value in identity.items():
        if says.get(field) != value:
            raise CheckpointError(
                f"The file {file!r} is another rank's or another save's: its field {field!r} is {says.get(field)!r},"
                f" and the checkpoint says {value!r}. Restore it from a copy, or resume from an earlier checkpoint."
            )
    if fingerprint and found != fingerprint:
        raise CheckpointError(
            f"The file {file!r} was changed after the checkpoint had been saved: its contents have another checksum"
            " than the checkpoint says. Restore it from a copy, or resume from an earlier checkpoint."
        )
    return state


def fingerprint_of(file: str, compare: bool) -> str:
    """A checksum of what ``torch.save`` has written, made from the checksums in its index; empty for other files.

    Args:
        file: The file, or a folder that ``DCTFSDPStrategy`` has saved, wherever fsspec reads.
        compare: Read all of a file on a local disk and compare it with its checksums, which ``torch.load`` does not.
            Storage services have checksums of their own.

    Raises:
        OSError: The file is missing, or may not be read.
        zipfile.BadZipFile: The file is truncated or does not match its checksums.
    """
    files, place = url_to_fs(file)
    if files.isdir(place):
        place = f"{place}/{_METADATA_FILENAME}"
    with files.open(place, "rb") as opened:
        begins = opened.read(len(_ZIP))
        if zipfile.is_zipfile(opened):
            compare = compare and isinstance(files, LocalFileSystem)
            parts = check_sums(opened) if compare else zipfile.ZipFile(opened).infolist()
            contents = [(part.filename, part.file_size, part.CRC) for part in parts]
            return hashlib.sha256(repr(contents).encode()).hexdigest()[:16]
    if begins == _ZIP[: len(begins)]:
        raise zipfile.BadZipFile("its end is missing")
    return ""


def check_sums(file: Any) -> list[zipfile.ZipInfo]:
    """Compare a file of ``torch.save``, open for reading, with its checksums, and return its index.

    Raises:
        zipfile.BadZipFile: They differ, or it is no such file.
    """
    with zipfile.ZipFile(file) as archive:
        corrupt = archive.testzip()
        if corrupt is not None:
            raise zipfile.BadZipFile(f"its part {corrupt!r} does not match its checksum")
        return archive.infolist()


def check_state(state: Any) -> None:
    """Refuse a value that is no rank's compression state, with a CheckpointError that names the field.

    Unknown parts are ignored.
    """
    fault = each(_anything)(state) or next((f" has no field {part}" for part in _PARTS if part not in state), "")
    if fault:
        raise CheckpointError(f"it{fault}")
    for part, check in (_PARTS | _OPTIONAL_PARTS).items():
        if part in state and (fault := check(state[part])):
            raise CheckpointError(f"its field {part}{fault}")


# Returns the fault of a value, as a sentence without its subject; empty for a valid one.
Check = Callable[[Any], str]


def must_be(what: str, holds: Callable[[Any], bool]) -> Check:
    """The check that a value is what it should be."""
    return lambda value: "" if holds(value) else f" is not {what}"


def _anything(value: Any) -> str:
    return ""


_name = must_be("a name", lambda value: isinstance(value, str))


def each(check: Check, key: Check = _name) -> Check:
    """The check that a value is a dict with such entries and such keys."""

    def check_all(value: Any) -> str:
        if not isinstance(value, Mapping):
            return " is not a dict"
        for name, entry in value.items():
            if key(name):
                return f" has the key {name!r}, which{key(name)}"
            if fault := check(entry):
                return f"[{name!r}]{fault}"
        return ""

    return check_all


def is_count(value: Any) -> bool:
    """Whether a value can be a number of steps, ranks or entries."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MORE_THAN_ANY_COUNT


def _is_number(value: Any, least: float) -> bool:
    # This refuses NaN, and integers beyond the largest float.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= sys.float_info.max


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


def _is_real_or_complex(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _is_list(value: Any) -> bool:
    return _is_dense(value) and value.ndim == 1 and value.is_floating_point()


def _is_residual(value: Any) -> bool:
    return _is_list(value) and value.numel() > 0 and bool(value.isfinite().all())


def _thresholds(value: Any) -> str:
    parts = {
        "values": each(must_be("a positive number", lambda value: _is_number(value, sys.float_info.min))),
        "targets": each(_count),
    }
    if not isinstance(value, Mapping) or value.keys() != parts.keys():
        return " is not a dict of values and targets"
    fault = next((f"[{part!r}]{fault}" for part, check in parts.items() if (fault := check(value[part]))), "")
    return fault or ("" if value["values"].keys() == value["targets"].keys() else " has values without targets")


_count = must_be("a count", is_count)
_totals = each(
    must_be("a number from 0 on", lambda value: _is_number(value, 0)),
    must_be("counted here", lambda key: key in {field.name for field in fields(TrafficTotals)}),
)
_residual = must_be("a list of finite numbers", _is_residual)
# A model may hold NaN, and then its weights and gradients do.
_tensors = each(
    must_be("a floating-point or complex tensor", lambda value: _is_dense(value) and _is_real_or_complex(value))
)

_PARTS: dict[str, Check] = {
    "synchronisations": _count,
    "steps_since_refresh": _count,
    "thresholds": _thresholds,
    "residuals": each(_residual),
    "owned": each(each(_residual, _count)),
    "traffic": _totals,
}
_OPTIONAL_PARTS: dict[str, Check] = {
    "accumulated": each(must_be("a gradient", _is_real_or_complex)),
    "identity": each(must_be("a number or a name", lambda value: isinstance(value, (int, str)))),
    # With updates each rank has its own between two exchanges.
    "weights": _tensors,
    "optimizers": must_be("a list", lambda value: isinstance(value, list)),
    "exchange_clocks": each(_count),
    "in_flight": each(must_be("a list of floating-point numbers", _is_list)),
    # With a Trainer.
    "split_traffic": _totals,
    "modules": each(each(_anything)),
}
