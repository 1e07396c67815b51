"""The format of a checkpoint: its files, the manifest that names them, and the valid contents of
each.

``docs/checkpoints.md`` shows the files. Every rank writes its own before Lightning's is written,
under a name that no other save has. So a job that is killed while it overwrites a checkpoint finds
the old file with the old state. After Lightning's file, rank 0 removes the files that were there
before.
"""

import errno
import hashlib
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any, TypedDict

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO
from torch import Tensor

from lightning_dct.checksums import CheckpointError
from lightning_dct.lightning_private import METADATA_FILENAME
from lightning_dct.traffic import TrafficTotals

CHECKPOINT_KEY = "lightning_dct"
FORMAT_VERSION = 4
REMEDY = "Restore it from a copy, or resume from an earlier checkpoint."  # of every damaged file
COARSEST_TIME = (
    2_000_000_000  # nanoseconds; some file systems count in seconds, or in pairs of them
)
_ZIP = b"PK\x03\x04"  # how a file of `torch.save` begins

# The name of a test in `_TESTS`; or two rules, for a dict's keys and its entries; or a rule for
# each field.
Rule = str | tuple["Rule", "Rule"] | dict[str, "Rule"]


def _is_count(value: Any) -> bool:
    # File names have twelve digits for a number of steps.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**12


def _is_number(value: Any, least: float, most: float = sys.float_info.max) -> bool:
    # This refuses NaN, and integers beyond the largest float.
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
    )


def _is_list(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and value.ndim == 1
        and value.is_floating_point()
    )


_TESTS: dict[str, Callable[[Any], bool]] = {
    "0 or 1": lambda value: isinstance(value, int) and value in (0, 1),
    "a count": _is_count,
    "a dense tensor": lambda value: isinstance(value, Tensor) and value.layout == torch.strided,
    "a gradient": lambda value: (
        isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    ),
    "a list": lambda value: isinstance(value, list),
    "a list of finite numbers": lambda value: (
        _is_list(value) and value.numel() > 0 and bool(value.isfinite().all())
    ),
    "a list of floating-point numbers": _is_list,
    "a name": lambda value: isinstance(value, str),
    "a name for files": lambda value: (
        isinstance(value, str) and bool(re.fullmatch("[0-9a-z]{1,32}", value))
    ),
    "a number from 0 on": lambda value: _is_number(value, 0),
    "a number from 1 on": lambda value: _is_count(value) and value > 0,
    "a number or a name": lambda value: isinstance(value, (int, str)),
    "a positive number": lambda value: _is_number(value, sys.float_info.min),
    "a share": lambda value: _is_number(value, sys.float_info.min, 1),
    "anything": lambda value: True,
    "counted here": lambda value: value in {field.name for field in fields(TrafficTotals)},
}


class _ManifestOfAll(TypedDict):
    """What every manifest has; ``checksum`` covers it."""

    format_version: int
    world_size: int
    synchronisations: int
    save: str  # the name of this save, which its files have in theirs
    stages: int  # ranks that together hold one replica of the parameters
    has_state: int  # 0 or 1
    has_rows: int  # 0 or 1
    fingerprints: list[str]  # of the ranks' files, by rank; empty if they are not known
    checksum: int


class Manifest(_ManifestOfAll, total=False):
    """The manifest in Lightning's checkpoint: which files are beside it."""

    places: list[tuple[str, str]]  # by rank, the host and the path of its file, for messages
    module: str | int | None  # of Fabric, the module that the files are of


_MANIFEST: dict[str, Rule] = {
    "world_size": "a number from 1 on",
    "synchronisations": "a count",
    "save": "a name for files",
    "stages": "a number from 1 on",
    "has_state": "0 or 1",
    "has_rows": "0 or 1",
    "fingerprints": "a list",  # by rank; empty if they are not known
}
MANIFEST_FIELDS = ("format_version", *_MANIFEST, "checksum")
_STATE: dict[str, Rule] = {
    "synchronisations": "a count",
    "steps_since_refresh": "a count",
    "thresholds": {"values": ("a name", "a positive number"), "targets": ("a name", "a count")},
    "residuals": ("a name", "a list of finite numbers"),
    "owned": ("a name", ("a count", "a list of finite numbers")),
    "traffic": ("counted here", "a number from 0 on"),
}
_OPTIONAL: dict[str, Rule] = {
    "accumulated": ("a name", "a gradient"),
    "identity": ("a name", "a number or a name"),
    # With updates each rank has its own between two exchanges, and buffers of any dtype. They may
    # hold NaN.
    "weights": ("a name", "a dense tensor"),
    "shared": ("a name", "a count"),  # checksums of the shared weights
    "optimizers": "a list",
    "groups": "a count",  # a checksum of the hyperparameters in Lightning's file
    "exchange_clocks": ("a name", "a count"),
    "in_flight": ("a name", "a list of floating-point numbers"),
    "coherence": ("a name", "a list of finite numbers"),
    "deviations": ("a name", "a list of finite numbers"),
    "held_back": ("a name", "a dense tensor"),
    "density": "a share",  # that was set in mid-run
    # With a Trainer.
    "split_traffic": ("counted here", "a number from 0 on"),
    "modules": ("a name", ("a name", "anything")),
}


def _fault(value: Any, rule: Rule) -> str:
    """What is wrong with a value, as a sentence without its subject; empty if it is valid."""
    if isinstance(rule, str):
        return "" if _TESTS[rule](value) else f" is not {rule}"
    if isinstance(rule, dict):
        if not isinstance(value, Mapping) or value.keys() != rule.keys():
            return f" is not a dict of {' and '.join(rule)}"
        return next(
            (
                f"[{name!r}]{fault}"
                for name, part in rule.items()
                if (fault := _fault(value[name], part))
            ),
            "",
        )
    if not isinstance(value, Mapping):
        return " is not a dict"
    for key, entry in value.items():
        if fault := _fault(key, rule[0]):
            return f" has the key {key!r}, which{fault}"
        if fault := _fault(entry, rule[1]):
            return f"[{key!r}]{fault}"
    return ""


def make_manifest(
    world_size: int,
    synchronisations: int,
    save: str,
    has_state: bool = True,
    has_rows: bool = False,
    stages: int = 1,
) -> Manifest:
    """The manifest of a checkpoint whose ranks have not written their files yet.

    ``save`` is the name of this save, the same on every rank, and ``stages`` the number of ranks
    that together hold one replica of the parameters. A checkpoint of weights alone has no state,
    one without sharded tables no rows.
    """
    return with_checksum(
        {
            "format_version": FORMAT_VERSION,
            "world_size": world_size,
            "synchronisations": synchronisations,
            "save": save,
            "stages": stages,
            "has_state": int(has_state),
            "has_rows": int(has_rows),
            "fingerprints": [],
            "checksum": 0,
        },
        [],
    )


def with_checksum(
    manifest: Manifest, fingerprints: Sequence[str], places: Sequence[tuple[str, str]] = ()
) -> Manifest:
    """The manifest with the fingerprints of all ranks' files, by rank, and a checksum of itself.

    ``places`` are the hosts and the paths of these files, if there are several hosts.
    """
    complete: Manifest = {**manifest, "fingerprints": list(fingerprints)}
    if places:
        complete["places"] = list(places)
    return {**complete, "checksum": _checksum(complete)}


def _checksum(manifest: Mapping[str, object]) -> int:
    return zlib.crc32(repr([manifest[field] for field in MANIFEST_FIELDS[:-1]]).encode())


def check_manifest(manifest: Any, path: str) -> None:
    """Refuse a value that is no manifest, one of another format version, or a changed one, with a
    CheckpointError.
    """
    version = manifest.get("format_version") if isinstance(manifest, Mapping) else FORMAT_VERSION
    if not _is_count(version) or version != FORMAT_VERSION:
        raise CheckpointError(
            f"The compression state of {path!r} has format version {version!r}; this lightning_dct"
            f" reads version {FORMAT_VERSION}. Resume with the version that saved it."
        )
    fault = " is not a dict"
    if isinstance(manifest, Mapping):
        fault = _fault({name: manifest.get(name) for name in _MANIFEST}, _MANIFEST)
        if not fault and manifest["world_size"] % manifest["stages"]:
            fault = "['stages'] does not divide the number of ranks"
        if not fault and len(manifest["fingerprints"]) not in (0, manifest["world_size"]):
            fault = "['fingerprints'] has another length than the number of ranks"
        if not fault and manifest.get("checksum") != _checksum(manifest):
            fault = " does not match its checksum"
    if fault:
        raise CheckpointError(
            f"The checkpoint {path!r} is damaged or was changed: its field {CHECKPOINT_KEY}{fault}."
            f" {REMEDY}"
        )


def written_where(manifest: Manifest, rank: int) -> str:
    """The host and the path at which a rank has written its file, as a sentence; empty if the
    manifest does not say.

    Only manifests of jobs on several hosts do, in a field that no checksum covers, because it is
    for messages.
    """
    path = written_as(manifest, rank)
    return f" Rank {rank} wrote it on {manifest['places'][rank][0]!r} as {path!r}." if path else ""


def written_as(manifest: Manifest, rank: int, beside: str = "") -> str:
    """The path at which a rank has written its file, or one beside it, on its host; empty if the
    manifest does not say.
    """
    try:
        path = str(manifest["places"][rank][1])
        return os.path.join(os.path.dirname(path), beside) if beside else path
    except (KeyError, IndexError, TypeError):
        return ""


def state_folder(checkpoint_path: str) -> str:
    """The folder that holds the ranks' files of a checkpoint."""
    folder, name = os.path.split(checkpoint_path)
    return os.path.join(folder, f"{no_checkpoint_name(name)}.dct")


def no_checkpoint_name(name: str) -> str:
    """A name for what lies beside a checkpoint.

    Lightning resumes from anything called ``hpc_ckpt_N``.
    """
    return name.replace("hpc_ckpt_", "hpc-ckpt-")


def state_path(checkpoint_path: str, manifest: Manifest, rank: int) -> str:
    """The file of one rank."""
    return f"{_prefix(checkpoint_path, manifest)}rank-{rank}-of-{manifest['world_size']}.pt"


def rows_path(checkpoint_path: str, manifest: Manifest) -> str:
    """The folder with the rows of sharded tables."""
    return f"{_prefix(checkpoint_path, manifest)}rows"


def _prefix(checkpoint_path: str, manifest: Manifest) -> str:
    return (
        f"{state_folder(checkpoint_path)}/{manifest['synchronisations']:012d}-{manifest['save']}-"
    )


def resolve_symlink(checkpoint_path: str) -> str:
    """The checkpoint whose files are read: ``ModelCheckpoint(save_last="link")`` leaves a link to
    it.
    """
    return os.path.realpath(checkpoint_path) if os.path.islink(checkpoint_path) else checkpoint_path


def save_of(file: str) -> str:
    """The name of the save that has written a file beside a checkpoint."""
    return os.path.basename(file).partition("-")[2].partition("-")[0]


def identity(manifest: Manifest, rank: int) -> dict[str, int | str]:
    """The identity that a rank's file must record."""
    return {
        "synchronisations": manifest["synchronisations"],
        "save": manifest["save"],
        "world_size": manifest["world_size"],
        "rank": rank,
    }


def write_state(
    checkpoint_io: CheckpointIO, path: str, manifest: Manifest, rank: int, state: Any
) -> str:
    """Write one rank's state and identity beside the checkpoint ``path``, and return the file's
    fingerprint.

    It is empty if a ``CheckpointIO`` of the user's writes elsewhere, or not with ``torch.save``.
    """
    file = state_path(path, manifest, rank)
    checkpoint_io.save_checkpoint({**state, "identity": identity(manifest, rank)}, file)
    keep_older(path, path)
    return fingerprint_of(file, compare=False) or ""


def read_checked(
    checkpoint_io: CheckpointIO,
    file: str,
    identity: Mapping[str, int | str],
    fingerprint: str = "",
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Read a rank's compression state, from a file of this identity.

    Only tensors and plain data are unpickled, unless the user loads with ``weights_only=False``.
    ``fingerprint`` is what :func:`fingerprint_of` returned when the file was written; empty if
    nothing is known. An OSError says that the file is missing or may not be read, a CheckpointError
    that it is not what was saved.
    """
    try:
        found = fingerprint_of(file, compare=True)
        state = checkpoint_io.load_checkpoint(file, weights_only=weights_only is not False)
        check_state(state)
    except Exception as error:
        if is_failed_access(error):
            raise
        # zipfile, pickle and torch raise many kinds of errors on a corrupt file.
        raise CheckpointError(
            f"The file {file!r}, one rank's part of a checkpoint, is damaged or is something else"
            f" ({error}). {REMEDY}"
        ) from error
    says = {**state.pop("identity", {}), "synchronisations": state["synchronisations"]}
    for field, value in identity.items():
        if says.get(field) != value:
            raise CheckpointError(
                f"The file {file!r} is another rank's or another save's: its field {field!r} is"
                f" {says.get(field)!r}, and the checkpoint says {value!r}. {REMEDY}"
            )
    if fingerprint and found != fingerprint:
        raise CheckpointError(
            f"The file {file!r} was changed after the checkpoint had been saved: its contents have"
            f" another checksum than the checkpoint says. {REMEDY}"
        )
    return state


def is_failed_access(error: Exception) -> bool:
    """Whether an error says that a file is missing or that a disk or a service has failed, and
    nothing of a file.
    """
    # A damaged archive may point to a place before its beginning, where nobody can read: an invalid
    # argument.
    return isinstance(error, OSError) and error.errno != errno.EINVAL


def check_state(state: Any) -> None:
    """Refuse a value that is no rank's compression state, with a CheckpointError that names the
    field.

    Unknown parts are ignored.
    """
    fault = _fault(state, ("a name", "anything"))
    fault = fault or next((f" has no field {part}" for part in _STATE if part not in state), "")
    if fault:
        raise CheckpointError(f"it{fault}")
    for part, rule in (_STATE | _OPTIONAL).items():
        if part in state and (fault := _fault(state[part], rule)):
            raise CheckpointError(f"its field {part}{fault}")
    if state["thresholds"]["values"].keys() != state["thresholds"]["targets"].keys():
        raise CheckpointError("its field thresholds has values without targets")


def fingerprint_of(file: str, compare: bool) -> str | None:
    """A checksum of what ``torch.save`` has written, made from the checksums in its index; empty
    for other files.

    It is None if nothing is there, as where a ``CheckpointIO`` of the user's writes elsewhere.
    ``file`` may also be a folder that ``DCTFSDPStrategy`` has saved, wherever fsspec reads. With
    ``compare``, all of a file on a local disk is compared with its checksums, which ``torch.load``
    does not; storage services have their own. A truncated or corrupt file is a zipfile.BadZipFile.
    """
    files, place = url_to_fs(file)
    if files.isdir(place):
        place = f"{place}/{METADATA_FILENAME}"
    if not files.exists(place):
        return None
    with files.open(place, "rb") as opened:
        begins = opened.read(len(_ZIP))
        # Python also reads archives that begin with something else, and torch does not.
        if begins == _ZIP and zipfile.is_zipfile(opened):
            with zipfile.ZipFile(opened) as archive:
                corrupt = (
                    archive.testzip() if compare and isinstance(files, LocalFileSystem) else None
                )
                contents = [
                    (part.filename, part.file_size, part.CRC) for part in archive.infolist()
                ]
            if corrupt is not None:
                raise zipfile.BadZipFile(f"its part {corrupt!r} does not match its checksum")
            return hashlib.sha256(repr(contents).encode()).hexdigest()[:16]
    if begins == _ZIP[: len(begins)]:
        raise zipfile.BadZipFile("its end is missing")
    return ""


def files_beside(path: str) -> list[str]:
    """The contents of a checkpoint's folder: before a save, files of earlier and of killed
    saves.
    """
    folder = state_folder(path)
    files, place = url_to_fs(folder)
    try:
        listed = files.ls(place, detail=False) if files.isdir(place) else []
    except FileNotFoundError:  # another node has just removed it from a shared disk
        return []
    # Storage services may list folders with a slash at their end, and the folder itself.
    names = {os.path.basename(name.rstrip("/")) for name in listed}
    return [f"{folder}/{name}" for name in sorted(names - {os.path.basename(place)})]


def remove_outdated(checkpoint_io: CheckpointIO, path: str, outdated: Sequence[str]) -> None:
    """Remove the files of earlier saves once Lightning's file points at newer ones."""
    for file in outdated:
        checkpoint_io.remove_checkpoint(file)
    # Not of a folder in which nothing was found: a `CheckpointIO` of the user's may have its files
    # elsewhere.
    if outdated and not files_beside(path):
        checkpoint_io.remove_checkpoint(state_folder(path))
    keep_older(path, path)


def keep_older(path: str, checkpoint_path: str) -> None:
    """Make the folder of ``path`` look older than a checkpoint: scripts take what has changed last
    for the newest checkpoint.

    Writing and removing files changes the folder's time. A save that is not complete yet looks
    older than all others. On local disks only: storage services have no folders.
    """
    files, folder = url_to_fs(state_folder(path))
    _, checkpoint = url_to_fs(checkpoint_path)
    if not isinstance(files, LocalFileSystem):
        return
    with suppress(OSError):  # it is not there, or belongs to another user
        saved_at = os.stat(checkpoint).st_mtime_ns if os.path.exists(checkpoint) else COARSEST_TIME
        os.utime(folder, ns=(os.stat(folder).st_atime_ns, saved_at - COARSEST_TIME))
