"""The files of each rank's compression state beside a Lightning checkpoint, and their use at another world size.

    epoch=3.ckpt                                Lightning's file, with a note that names the files below
    epoch=3.ckpt.dct/
        000000001200-5f0c93ab-rank-0-of-2.pt    residuals, thresholds and counters of rank 0 after 1200 synchronisations
        000000001200-5f0c93ab-rank-1-of-2.pt
        000000001200-5f0c93ab-rows/             rows of sharded tables, where there are any

Every rank writes its own file before Lightning's is written, under a name that no other save has. So a job that is
killed while it overwrites a checkpoint finds the old file with the old state. After Lightning's file, rank 0 removes
the files that were there before.
"""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from fsspec.core import url_to_fs
from lightning.fabric.plugins import CheckpointIO
from torch import Tensor

from lightning_dct.files import no_checkpoint_name
from lightning_dct.gradients.memory import add_pieces, pieces_extent
from lightning_dct.state_file import Check, CheckpointError, fingerprint_of, is_count, must_be, read_checked

CHECKPOINT_KEY = "lightning_dct"
FORMAT_VERSION = 3
_is_flag = must_be("0 or 1", lambda value: isinstance(value, int) and value in (0, 1))
_is_several = must_be("a number from 1 on", lambda value: is_count(value) and value > 0)
_NOTE: dict[str, Check] = {
    "world_size": _is_several,
    "synchronisations": must_be("a number of steps", is_count),
    # It becomes part of file names.
    "save": must_be("a name", lambda value: isinstance(value, str) and bool(re.fullmatch("[0-9a-z]{1,32}", value))),
    "stages": _is_several,
    "has_state": _is_flag,
    "has_rows": _is_flag,
    # By rank; empty if they are not known.
    "fingerprints": must_be("a list of checksums", lambda value: isinstance(value, list)),
}
NOTE_FIELDS = ("format_version", *_NOTE, "checksum")


def make_note(
    world_size: int, synchronisations: int, save: str, has_state: bool = True, has_rows: bool = False, stages: int = 1
) -> dict[str, Any]:
    """The note in Lightning's checkpoint about the files beside it.

    ``save`` is the name of this save, the same on every rank, and ``stages`` the number of ranks that together hold one
    replica of the parameters. A checkpoint of weights alone has no state, one without sharded tables no rows.
    """
    note: dict[str, Any] = {"format_version": FORMAT_VERSION, "world_size": world_size}
    note |= {"synchronisations": synchronisations, "save": save}
    if stages > 1:
        note["stages"] = stages
    return seal(note | {"has_state": int(has_state), "has_rows": int(has_rows)}, [])


def seal(note: Mapping[str, Any], fingerprints: Sequence[str]) -> dict[str, Any]:
    """The note with the fingerprints of all ranks' files, by rank, and a checksum of itself."""
    sealed = {**note, "fingerprints": list(fingerprints)}
    return {**sealed, "checksum": _checksum(sealed)}


def check_note(note: Any, path: str) -> None:
    """Refuse a value that is no note, one of another format version, or a changed one, with a CheckpointError."""
    version = note.get("format_version") if isinstance(note, Mapping) else FORMAT_VERSION
    if not is_count(version) or version != FORMAT_VERSION:
        raise CheckpointError(
            f"The compression state of {path!r} has format version {version!r}; this lightning_dct reads version"
            f" {FORMAT_VERSION}. Resume with the version that saved it."
        )
    if fault := _fault_in(note):
        raise CheckpointError(
            f"The checkpoint {path!r} is damaged or was changed: its field {CHECKPOINT_KEY}{fault}. Restore it from a"
            " copy, or resume from an earlier checkpoint."
        )


def _fault_in(note: Any) -> str:
    if not isinstance(note, Mapping):
        return " is not a dict"
    complete = {"stages": 1, "fingerprints": [], **note}
    for field, check in _NOTE.items():
        if fault := check(complete.get(field)):
            return f"[{field!r}]{fault}"
    if complete["world_size"] % complete["stages"]:
        return "['stages'] does not divide the number of ranks"
    if len(complete["fingerprints"]) not in (0, complete["world_size"]):
        return "['fingerprints'] has another length than the number of ranks"
    return "" if note.get("checksum", _checksum(note)) == _checksum(note) else " does not match its checksum"


def _checksum(note: Mapping[str, Any]) -> int:
    return zlib.crc32(repr([note[field] for field in ("format_version", *_NOTE) if field in note]).encode())


def identity(note: Mapping[str, Any], rank: int) -> dict[str, int | str]:
    """The identity that a rank's file must record."""
    return {**{field: note[field] for field in ("synchronisations", "save", "world_size")}, "rank": rank}


def state_folder(checkpoint_path: str) -> str:
    """The folder that holds the ranks' files of a checkpoint."""
    return f"{checkpoint_path}.dct"


def unfinished_folder(checkpoint_path: str) -> str:
    """The folder that the ranks write to.

    It is another one if Lightning would take the folder of a killed save for a checkpoint, and :func:`finish` renames
    it.
    """
    folder, name = os.path.split(checkpoint_path)
    return os.path.join(folder, f"{no_checkpoint_name(name)}.dct")


def state_path(checkpoint_path: str, note: Mapping[str, Any], rank: int, writing: bool = False) -> str:
    """The file of one rank, to read it or to write it."""
    return _path(checkpoint_path, f"{_prefix(note)}rank-{rank}-of-{note['world_size']}.pt", writing)


def rows_path(checkpoint_path: str, note: Mapping[str, Any], writing: bool = False) -> str:
    """The folder with the rows of sharded tables, to read it or to write it."""
    return _path(checkpoint_path, f"{_prefix(note)}rows", writing)


def _path(checkpoint_path: str, name: str, writing: bool) -> str:
    folder, unfinished = state_folder(checkpoint_path), unfinished_folder(checkpoint_path)
    if folder != unfinished and not writing:
        # A save was killed before it had renamed the folder, or this is another node's disk.
        files, place = url_to_fs(f"{unfinished}/{name}")
        writing = files.exists(place)
    return f"{unfinished if writing else folder}/{name}"


def _prefix(note: Mapping[str, Any]) -> str:
    return f"{note['synchronisations']:012d}-{note['save']}-"


def save_of(file: str) -> str:
    """The name of the save that has written a file beside a checkpoint."""
    return os.path.basename(file).partition("-")[2].partition("-")[0]


def resolve_symlink(checkpoint_path: str) -> str:
    """The checkpoint whose files are read: ``ModelCheckpoint(save_last="link")`` leaves a link to it."""
    return os.path.realpath(checkpoint_path) if os.path.islink(checkpoint_path) else checkpoint_path


def write_state(checkpoint_io: CheckpointIO, path: str, note: Mapping[str, Any], rank: int, state: Any) -> str:
    """Write one rank's state and identity beside the checkpoint ``path``, and return the file's fingerprint.

    It is empty if a ``CheckpointIO`` of the user's writes elsewhere, or not with ``torch.save``.
    """
    file = state_path(path, note, rank, writing=True)
    checkpoint_io.save_checkpoint({**state, "identity": identity(note, rank)}, file)
    try:
        return fingerprint_of(file, compare=False)
    except FileNotFoundError:
        return ""


def files_beside(path: str) -> list[str]:
    """What lies in the folders of a checkpoint: before a save, files of earlier and of killed saves."""
    found = []
    for folder in {state_folder(path), unfinished_folder(path)}:
        files, place = url_to_fs(folder)
        if files.isdir(place):
            # Storage services may list folders with a slash at their end, and the folder itself.
            names = {os.path.basename(name.rstrip("/")) for name in files.ls(place, detail=False)}
            found += [f"{folder}/{name}" for name in sorted(names - {os.path.basename(place)})]
    return found


def finish(checkpoint_io: CheckpointIO, path: str, outdated: Iterable[str]) -> None:
    """Remove the files of earlier saves once Lightning's file points at newer ones, and give the folder its name."""
    for name in outdated:
        checkpoint_io.remove_checkpoint(name)
    folder, unfinished = state_folder(path), unfinished_folder(path)
    files, place = url_to_fs(folder)
    if unfinished != folder:
        for name in files_beside(path):
            if name.startswith(f"{unfinished}/"):
                files.makedirs(place, exist_ok=True)
                files.mv(url_to_fs(name)[1], f"{place}/{os.path.basename(name)}", recursive=True)
        checkpoint_io.remove_checkpoint(unfinished)
    if not files_beside(path):
        checkpoint_io.remove_checkpoint(folder)


def read_state(
    checkpoint_io: CheckpointIO, path: str, note: Mapping[str, Any], rank: int, world_size: int, stages: int = 1
) -> dict[str, Any]:
    """Read the state a rank starts from: its own, or the merged states of all ranks if the layout has changed.

    :func:`check_note` has accepted ``note``; ``world_size`` and ``stages`` describe the layout now.

    Raises:
        CheckpointError: A file is corrupt, or belongs to another rank, save or step.
        FileNotFoundError: The files are not beside the checkpoint.
    """
    states = []
    saved_stages = note.get("stages", 1)
    same_layout = (world_size, stages) == (note["world_size"], saved_stages)
    fingerprints = note.get("fingerprints") or [""] * note["world_size"]
    for saved_rank in [rank] if same_layout else range(note["world_size"]):
        file = state_path(path, note, saved_rank)
        try:
            states.append(read_checked(checkpoint_io, file, identity(note, saved_rank), fingerprints[saved_rank]))
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"The checkpoint {path!r} was saved with compression state, but {file!r} is not there. Put the folder"
                f" {state_folder(path)!r} beside the checkpoint, or continue without the ranks' residuals:"
                " `missing_state='reset'` in the strategy."
            ) from error
    try:
        if len(states) > 1 and "shards" in states[0]:
            states, saved_stages = put_together(states, saved_stages), 1
        return merge_states(states, saved_stages)
    except Exception as error:
        # torch raises many kinds of errors on tensors that do not fit.
        raise CheckpointError(
            f"The ranks' files in {state_folder(path)!r} do not fit each other ({error}). Restore the folder from a"
            " copy, or resume from an earlier checkpoint."
        ) from error


def merge_states(states: Sequence[Mapping[str, Any]], stages: int = 1) -> dict[str, Any]:
    """The state a rank starts from, made of the states that it has read.

    The ranks' residuals, of their own gradients and of the sums they own, enter the model as their *mean* over the
    ranks. Every rank of a new world starts with that mean, which conserves it for any two world sizes. The mean is
    computed in fp64.

    ``states`` is one state (the rank's own), or those of all ranks of the saved world, of which ``stages`` ranks
    together held one replica. In the result each entry of ``"modules"`` is the list of that module's states.
    """
    modules = {name: [state["modules"][name] for state in states] for name in states[0].get("modules", {})}
    merged = {**states[0], "modules": modules}
    if len(states) == 1:
        return merged
    replicas = len(states) // stages
    # A mean of the ranks' optimizers would continue none of them. Updates in flight are still in the ranks' own
    # weights, and are sent again.
    for part in ("optimizers", "in_flight"):
        merged.pop(part, None)
    names = {name for state in states for part in ("residuals", "owned") for name in state[part]}
    merged["residuals"] = {name: _mean_residual(states, name, replicas) for name in sorted(names)}
    merged["owned"] = {}
    merged["accumulated"] = _mean_over_replicas(states, "accumulated", replicas)
    if "weights" in merged:
        merged["weights"] = _mean_over_replicas(states, "weights", replicas)
    if stages > 1:
        # Each rank has the thresholds of its own stage only.
        merged["thresholds"] = {
            part: {name: value for state in reversed(states) for name, value in state["thresholds"][part].items()}
            for part in states[0]["thresholds"]
        }
    return merged


def empty_state(note: Mapping[str, Any]) -> dict[str, Any]:
    """The state of ranks without residuals, at the step of the checkpoint that a note belongs to."""
    return {
        "synchronisations": note["synchronisations"],
        "steps_since_refresh": 0,
        "thresholds": {"values": {}, "targets": {}},
        "residuals": {},
        "owned": {},
        "traffic": {},
        "modules": {},
    }


def _mean_over_replicas(states: Sequence[Mapping[str, Any]], part: str, replicas: int) -> dict[str, Tensor]:
    """The mean of gradients or weights by name, computed in fp64 or complex128."""
    total: dict[str, Tensor] = {}
    first: dict[str, Tensor] = {}
    for state in states:
        for name, tensor in state.get(part, {}).items():
            if tensor.is_sparse:
                # Those of sharded tables belong to rows that another rank owns now.
                continue
            of_first = first.setdefault(name, tensor)
            if (tensor.shape, tensor.dtype) != (of_first.shape, of_first.dtype):
                raise CheckpointError(f"they disagree on the shape or the dtype of {part}[{name!r}]")
            wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
            total[name] = total[name] + wide if name in total else wide
    return {name: (tensor / replicas).to(first[name].dtype) for name, tensor in total.items()}


def _mean_residual(states: Sequence[Mapping[str, Any]], name: str, replicas: int) -> Tensor:
    """The ranks' residuals of a tensor, of their own gradients and of sums they own, over the number of replicas."""
    residuals = [state["residuals"][name] for state in states if name in state["residuals"]]
    owned = [state["owned"][name] for state in states if name in state["owned"]]
    dtype = residuals[0].dtype if residuals else next(iter(owned[0].values())).dtype
    size = max([residual.numel() for residual in residuals] + [pieces_extent(pieces) for pieces in owned])
    total = torch.zeros(size, dtype=torch.float64)
    for residual in residuals:
        if residual.numel() != size:
            raise CheckpointError(f"they disagree on the number of entries of residuals[{name!r}]")
        total += residual.flatten()
    for pieces in owned:
        add_pieces(total, pieces)
    return (total / replicas).to(dtype)


def put_together(states: Sequence[Mapping[str, Any]], shards: int) -> list[dict[str, Any]]:
    """The states of whole replicas of ``shards`` ranks each, from the states of all ranks, to be cut anew.

    ``"shards"`` in a state has the shapes of its pieces: consecutive ranks of a replica have consecutive rows of every
    parameter and of its residual.
    """
    return [_whole(states[first : first + shards]) for first in range(0, len(states), shards)]


def _whole(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    whole = {key: value for key, value in pieces[0].items() if key != "shards"}
    for part in ("weights", "residuals", "accumulated"):
        names = dict.fromkeys(name for piece in pieces for name in piece.get(part, {}))
        if part in whole:
            whole[part] = {name: _joined(pieces, part, name) for name in names}
    whole["owned"] = {}
    before: dict[str, int] = {}
    for piece in pieces:
        for name, parts in piece["owned"].items():
            moved = {before.get(name, 0) + start: tensor for start, tensor in parts.items()}
            whole["owned"].setdefault(name, {}).update(moved)
        for name, shape in piece["shards"].items():
            before[name] = before.get(name, 0) + math.prod(shape)
    return whole


def _joined(pieces: Sequence[Mapping[str, Any]], part: str, name: str) -> Tensor:
    """One tensor of the ranks' shards, with zeros for a rank without one; a buffer is whole on every rank."""
    there = next(piece[part][name] for piece in pieces if name in piece[part])
    if name not in pieces[0]["shards"]:
        return there
    flat = [
        piece[part][name].reshape(-1) if name in piece[part] else there.new_zeros(math.prod(piece["shards"][name]))
        for piece in pieces
    ]
    is_flat = part == "residuals"
    return torch.cat(flat) if is_flat else torch.cat(flat).view(-1, *there.shape[1:])
