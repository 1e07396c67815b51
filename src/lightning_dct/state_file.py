"""Reads one rank's file of a checkpoint, and says so where it is damaged or is something else."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from torch import Tensor

from lightning_dct.traffic import TrafficTotals


def read_checked(checkpoint_io: CheckpointIO, file: str) -> dict[str, Any]:
    """Read a rank's compression state. Nothing but tensors and plain data is ever unpickled.

    Args:
        checkpoint_io: What reads files.
        file: The path.

    Raises:
        OSError: It is not there, or may not be read.
        ValueError: It is damaged or holds something else; the message names the file and the remedy.
    """
    try:
        check_sums(file)
        state = checkpoint_io.load_checkpoint(file, weights_only=True)
        check_state(state)
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:
        # What a damaged file makes zipfile, pickle and torch raise is of a dozen kinds.
        raise ValueError(
            f"The file {file!r}, one rank's part of a checkpoint, is damaged or is something else ({error}). Restore it"
            " from a copy, or resume from an earlier checkpoint."
        ) from error
    return state


def check_sums(file: Any) -> None:
    """Compare what a file holds with the checksums in it, which ``torch.load`` does not do.

    Args:
        file: A path, or a file that is open for reading. What ``torch.save`` has not written passes, and so does what
            is not on this machine: storage services have checksums of their own.

    Raises:
        zipfile.BadZipFile: They differ.
    """
    if isinstance(file, str) and not os.path.isfile(file):
        return
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as archive:
        harmed = archive.testzip()
    if harmed is not None:
        raise zipfile.BadZipFile(f"its part {harmed!r} does not match its checksum")


def check_state(state: Any) -> None:
    """Refuse what is no rank's compression state, before any of it is used.

    Raises:
        ValueError: Something is missing or of another kind; the message says what.
    """
    _check(state, "the state", _of(_is_name, _anything))
    for part, holds in _PARTS.items():
        if part not in state:
            raise ValueError(f"it has no {part!r}")
        _check(state[part], part, holds)
    for part, holds in _OPTIONAL_PARTS.items():
        if part in state:
            _check(state[part], part, holds)


Test = Callable[[Any], bool]


def _check(value: Any, part: str, holds: Test) -> None:
    if not holds(value):
        raise ValueError(f"{part!r} in it is not what it should be")


def _anything(value: Any) -> bool:
    return True


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_total(value: Any) -> bool:
    return value in {field.name for field in fields(TrafficTotals)}


def _is_residual(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 1 and value.is_floating_point() and value.numel() > 0


def _is_measured(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and _is_number(value[0]) and _is_count(value[1])


def _is_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _of(key: Test, value: Test) -> Test:
    return lambda mapping: isinstance(mapping, Mapping) and all(key(k) and value(v) for k, v in mapping.items())


def _is_thresholds(value: Any) -> bool:
    parts = {"values": _of(_is_name, _is_number), "targets": _of(_is_name, _is_count)}
    return (
        isinstance(value, Mapping)
        and value.keys() == parts.keys()
        and all(holds(value[part]) for part, holds in parts.items())
        and value["values"].keys() == value["targets"].keys()
    )


_PARTS: dict[str, Test] = {
    "synchronisations": _is_count,
    "steps_since_refresh": _is_count,
    "thresholds": _is_thresholds,
    "residuals": _of(_is_name, _is_residual),
    "traffic": _of(_is_total, _is_number),
}
_OPTIONAL_PARTS: dict[str, Test] = {
    "accumulated": _of(_is_name, _is_gradient),
    # Checkpoints of the first release have none of these.
    "owned": _of(_is_name, _of(_is_count, _is_residual)),
    "split_traffic": _of(_is_total, _is_number),
    "modules": _of(_is_name, _of(_is_name, _anything)),
    "split_points": _of(_is_name, _anything),
    # Those of 0.2 and before have none.
    "weight_sizes": _of(_is_name, _is_measured),
}
