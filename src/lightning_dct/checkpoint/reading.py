"""Reads a checkpoint: a rank's own state, or at another world size one made of the states of all
ranks that saved.

Ranks read it collectively: an error on one rank is raised on all of them. Otherwise the other ranks
would wait for it in their next collective.
"""

import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_dct.agreement import Result, like, on_all_ranks
from lightning_dct.checkpoint import format as saved
from lightning_dct.checkpoint.handing_over import File, hand_over
from lightning_dct.checksums import CheckpointError, checksum_of
from lightning_dct.compress.error_feedback import add_pieces, pieces_extent
from lightning_dct.strategy_protocols import CheckpointedRank
from lightning_dct.sync.synchronizer import Synchronizer

RESETTABLE = (FileNotFoundError, ValueError)  # errors after which `missing_state="reset"` continues
# Parts of a state without a meaning in another layout. A mean of the ranks' optimizers or loss
# scalers would continue none of them, and of shards they have other rows. Updates in flight are
# still in the ranks' own weights: sent again. So are residuals that were held back.
OF_ONE_RANK = ("optimizers", "scaler", "in_flight", "deviations", "held_back")


def read_on_all_ranks(
    read: Callable[[], Result], path: str, kinds: tuple[type[Exception], ...] = ()
) -> list[Result]:
    """The results of all ranks, or the error of one rank, raised on every rank; a collective call.

    ``read`` reads a part of the checkpoint ``path``, without a collective call. An error of these
    ``kinds``, and a file that is missing, stay as they are, if no rank has another error. An
    OSError says that a disk or a service has failed. Any other error becomes a CheckpointError.
    """
    return on_all_ranks(read, lambda error: _of_reading(path, error, kinds))


def _of_reading(path: str, error: Exception, kinds: tuple[type[Exception], ...] = ()) -> Exception:
    if type(error) in (*kinds, CheckpointError) or isinstance(error, FileNotFoundError):
        return error
    if isinstance(error, OSError) and saved.is_failed_access(error):
        return like(
            error,
            f"The checkpoint {path!r} cannot be read ({type(error).__name__}: {error}). It may be"
            " whole.",
        )
    # torch, zipfile and pickle raise a dozen kinds of errors on what does not fit.
    return CheckpointError(
        f"The checkpoint {path!r} is damaged or does not fit ({type(error).__name__}: {error})."
        f" {saved.REMEDY}"
    )


@contextmanager
def compared(path: str) -> Iterator[list[str | None]]:
    """Compare Lightning's file, which is read within, with its checksums; the fingerprint of each
    rank's file.

    A collective call: if some rank's file is missing or corrupt, all raise a FileNotFoundError or a
    CheckpointError.
    """
    everyone = read_on_all_ranks(lambda: (saved.fingerprint_of(path, compare=True), path), path)
    found = [theirs for theirs, _ in everyone]
    paths = [their_path for _, their_path in everyone]
    if missing := [rank for rank, theirs in enumerate(found) if theirs is None and any(found)]:
        remedy = _other_names(paths) or "Copy it to all machines."
        raise FileNotFoundError(
            f"The checkpoint {path!r} is not there on ranks {missing}. {remedy}"
        )
    if not all(found):
        # Only some are files of `torch.save`: reading them would fail on some ranks.
        check_same_fields({rank: {"checksum": theirs} for rank, theirs in enumerate(found)}, path)
    try:
        yield found
    except Exception as error:
        if all(found):
            raise
        # It is no file of `torch.save`, and may raise anything.
        if (explained := _of_reading(path, error)) is error:
            raise
        raise explained from error


def _other_names(paths: Sequence[str]) -> str:
    """Advice for ranks that have chosen checkpoints of different names; empty if they have not."""
    first = next(
        (
            rank
            for rank, path in enumerate(paths)
            if os.path.basename(path) != os.path.basename(paths[0])
        ),
        None,
    )
    if first is None:
        return ""
    return (
        f"The ranks have chosen different ones: rank 0 {paths[0]!r}, rank {first} {paths[first]!r}."
        " Rank 0 names what is saved. If a metric is in the name, or chooses the best, log it with"
        " `sync_dist=True`, which makes it the same on all ranks. Or give every rank the path that"
        " rank 0 has."
    )


def agreed_manifests(
    manifests: Any, path: str, fingerprints: Sequence[str | None] = ()
) -> list[saved.Manifest]:
    """The manifests that this rank found in a checkpoint, if all ranks found the same, else a
    CheckpointError on all.

    A collective call. A checkpoint of plain DDP or of weights alone has none. ``fingerprints`` are
    those of the ranks' files of Lightning.
    """

    def read() -> dict[str, Any]:
        if not isinstance(manifests, list):
            raise CheckpointError(
                f"The field {saved.CHECKPOINT_KEY} of {path!r} is not a list. Resume with the code"
                " that saved it."
            )
        for manifest in manifests:
            saved.check_manifest(manifest, path)
        return {
            f"{saved.CHECKPOINT_KEY}{f' of module {number}' if number else ''}[{field!r}]": (
                manifest.get(field)
            )
            for number, manifest in enumerate(manifests)
            for field in saved.MANIFEST_FIELDS
        }

    check_same_fields(dict(enumerate(read_on_all_ranks(read, path))), path)
    check_same_fields(
        {rank: {"checksum": theirs} for rank, theirs in enumerate(fingerprints)}, path
    )
    return manifests


def digest_of(synchronizer: Synchronizer) -> dict[str, Any]:
    """The state that must be equal on all ranks that exchange with this one, tensors as checksums;
    and these ranks.
    """
    return {"ranks": list(synchronizer.peers)} | {
        name: checksum_of(value) if isinstance(value, Tensor) else value
        for name, value in synchronizer.shared_state().items()
    }


def check_replicas(digests: Sequence[Mapping[str, Any]], path: str) -> None:
    """Refuse digests that differ among ranks that exchange with each other (CheckpointError)."""
    for ranks in {tuple(digest["ranks"]) for digest in digests if digest}:
        check_same_fields({rank: digests[rank] for rank in ranks}, path)


def check_same_fields(everyone: Mapping[int, Mapping[str, Any]], path: str) -> None:
    """Refuse fields of a checkpoint that ranks have read with different values (CheckpointError,
    with each value).
    """
    for field in dict.fromkeys(field for theirs in everyone.values() for field in theirs):
        values = {rank: theirs.get(field) for rank, theirs in everyone.items()}
        if any(value != values[min(values)] for value in values.values()):
            per_rank = ", ".join(f"rank {rank}: {value!r}" for rank, value in values.items())
            raise CheckpointError(
                f"The ranks have read different checkpoints from {path!r}: they disagree on its"
                f" field {field} ({per_rank}). Use the same file on all ranks, or resume from an"
                " earlier checkpoint."
            )


def files_of_ranks(strategy: CheckpointedRank, manifest: saved.Manifest) -> range:
    """The ranks whose files of a checkpoint this rank reads: its own, or all of them in another
    layout.
    """
    rank = strategy.global_rank
    layout = (strategy.world_size, strategy.stages)
    is_same = layout == (manifest["world_size"], manifest["stages"])
    return range(rank, rank + 1) if is_same else range(manifest["world_size"])


def restore_state(
    strategy: CheckpointedRank,
    path: str,
    manifest: saved.Manifest,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """The state that this rank starts from; a collective call.

    ``strategy`` is any of this package's, ``manifest`` has been checked, and ``weights_only`` is
    the user's. If any rank's file is missing or was saved with another ``compress``,
    ``config.missing_state`` chooses: a FileNotFoundError or ValueError on every rank, or all ranks
    start without residuals. A file that some rank cannot use is a CheckpointError on every rank.
    Ranks that exchanged all of their gradients have none, and may exchange updates.
    """
    config = strategy.config
    state: dict[str, Any] = {}
    ranks = files_of_ranks(strategy, manifest)
    files = [
        File(
            os.path.basename(saved.state_path(path, manifest, one)), saved.written_as(manifest, one)
        )
        for one in ranks
    ]
    hand_over(strategy, saved.state_folder(path), files)

    def read() -> None:
        layout = strategy.global_rank, strategy.world_size, strategy.stages, strategy.holds_shards
        state.update(read_state(strategy.checkpoint_io, path, manifest, *layout, weights_only))
        # Ranks save weights of their own only if updates are exchanged.
        saved_with = "updates" if "weights" in state else "gradients"
        has_residuals = "weights" in state or state["residuals"] or state["owned"]
        if saved_with != config.compress and has_residuals:
            raise ValueError(
                f"The checkpoint {path!r} was saved with `compress={saved_with!r}`: the ranks'"
                f" residuals are {saved_with}, and this run exchanges {config.compress}. Resume"
                f" with `compress={saved_with!r}`, or continue without the ranks' residuals:"
                " `missing_state='reset'` in the strategy."
            )

    try:
        read_on_all_ranks(read, path, RESETTABLE)
    except RESETTABLE as error:
        if config.missing_state != "reset" or type(error) not in RESETTABLE:
            raise
        rank_zero_warn(
            f"{error} The strategy has that setting, so training continues from step"
            f" {manifest['synchronisations']} with an empty residual on every rank. Changes that"
            " were not sent before the save are lost."
        )
        return state_of_nothing(manifest["synchronisations"])
    return state


def state_of_nothing(synchronisations: int) -> dict[str, Any]:
    """The state of a rank that has nothing to send, after so many steps."""
    counted = {"synchronisations": synchronisations, "steps_since_refresh": 0, "traffic": {}}
    return {
        **counted,
        "thresholds": {"values": {}, "targets": {}},
        "residuals": {},
        "owned": {},
        "modules": {},
    }


def read_state(
    checkpoint_io: CheckpointIO,
    path: str,
    manifest: saved.Manifest,
    rank: int,
    world_size: int,
    stages: int = 1,
    holds_shards: bool = False,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Read the state a rank starts from: its own, or the merged states of all ranks if the layout
    has changed.

    :func:`check_manifest` has accepted ``manifest``; ``world_size``, ``stages`` and
    ``holds_shards`` (of every parameter, and not whole stages) describe the layout now. A file that
    is not what was saved is a CheckpointError.
    """
    saved_stages = manifest["stages"]
    same_layout = (world_size, stages) == (manifest["world_size"], saved_stages)
    fingerprints = manifest["fingerprints"] or [""] * manifest["world_size"]

    def read_one(saved_rank: int) -> dict[str, Any]:
        file = saved.state_path(path, manifest, saved_rank)
        known = fingerprints[saved_rank]
        try:
            return saved.read_checked(
                checkpoint_io, file, saved.identity(manifest, saved_rank), known, weights_only
            )
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"The checkpoint {path!r} was saved with compression state, but {file!r} is not"
                f" there.{saved.written_where(manifest, saved_rank)} Put the folder"
                f" {saved.state_folder(path)!r} beside the checkpoint, or continue without the"
                " ranks' residuals: `missing_state='reset'` in the strategy."
            ) from error

    own = read_one(rank) if same_layout else {}
    if same_layout and (stages == 1 or ("shards" in own) == holds_shards):
        return merge_states([own])
    states = [read_one(saved_rank) for saved_rank in range(manifest["world_size"])]
    try:
        if "shards" in states[0]:
            replicas = [
                states[first : first + saved_stages]
                for first in range(0, len(states), saved_stages)
            ]
            states = [put_together(replica) for replica in replicas]
            saved_stages = 1
        merged = merge_states(states, saved_stages)
        return {part: value for part, value in merged.items() if part not in OF_ONE_RANK}
    except Exception as error:
        # torch raises many kinds of errors on tensors that do not fit.
        raise CheckpointError(
            f"The ranks' files in {saved.state_folder(path)!r} do not fit each other ({error})."
            " Restore the folder from a copy, or resume from an earlier checkpoint."
        ) from error


def merge_states(states: Sequence[Mapping[str, Any]], stages: int = 1) -> dict[str, Any]:
    """The state a rank starts from, made of the states that it has read.

    The ranks' residuals, of their own gradients and of the sums they own, enter the model as their
    *mean* over the ranks, in fp64. Every rank of a new world starts with that mean, which conserves
    it for any two world sizes.

    ``states`` is one state (the rank's own), or those of all ranks of the saved world, of which
    ``stages`` ranks together held one replica. In the result each entry of ``"modules"`` is the
    list of that module's states. Parts that are ``OF_ONE_RANK`` are those of the first.
    """
    modules = {
        name: [state["modules"][name] for state in states] for name in states[0].get("modules", {})
    }
    merged = {**states[0], "modules": modules}
    if len(states) == 1:
        return merged
    replicas = len(states) // stages
    names = {name for state in states for part in ("residuals", "owned") for name in state[part]}
    merged["residuals"] = {name: _mean_residual(states, name, replicas) for name in sorted(names)}
    merged["owned"] = {}
    merged["accumulated"] = _mean_over_replicas(states, "accumulated", replicas)
    if "weights" in merged:
        merged["weights"] = _mean_over_replicas(states, "weights", replicas)
    if stages > 1:
        # Each rank has the thresholds and the weights of its own stage only.
        merged["shared"] = {
            name: value for state in states for name, value in state.get("shared", {}).items()
        }
        merged["thresholds"] = {
            part: {
                name: value
                for state in reversed(states)
                for name, value in state["thresholds"][part].items()
            }
            for part in states[0]["thresholds"]
        }
    return merged


def _mean_over_replicas(
    states: Sequence[Mapping[str, Any]], part: str, replicas: int
) -> dict[str, Tensor]:
    """The mean of gradients or weights by name, computed in fp64 or complex128."""
    stages = len(states) // replicas
    # What every stage of a replica has, such as a buffer outside the network, counts once: the last
    # one's.
    held = {
        (number // stages, name): tensor
        for number, state in enumerate(states)
        for name, tensor in state.get(part, {}).items()
    }
    total: dict[str, Tensor] = {}
    first: dict[str, Tensor] = {}
    for (_, name), tensor in held.items():
        if tensor.is_sparse:
            # Those of sharded tables belong to rows that another rank owns now.
            continue
        of_first = first.setdefault(name, tensor)
        if (tensor.shape, tensor.dtype) != (of_first.shape, of_first.dtype):
            raise CheckpointError(f"they disagree on the shape or the dtype of {part}[{name!r}]")
        wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
        total[name] = total[name] + wide if name in total else wide
    # Buffers may be counts or flags, of which there is no mean.
    exact = {
        name: one
        for name, one in first.items()
        if not (one.is_floating_point() or one.is_complex())
    }
    return {
        name: (tensor / replicas).to(first[name].dtype) for name, tensor in total.items()
    } | exact


def _mean_residual(states: Sequence[Mapping[str, Any]], name: str, replicas: int) -> Tensor:
    """The ranks' residuals of a tensor, of their own gradients and of sums they own, over the
    number of replicas.
    """
    residuals = [state["residuals"][name] for state in states if name in state["residuals"]]
    owned = [state["owned"][name] for state in states if name in state["owned"]]
    parts = [{0: residual.flatten()} for residual in residuals] + owned
    size = max(map(pieces_extent, parts))
    if any(residual.numel() != size for residual in residuals):
        raise CheckpointError(f"they disagree on the number of entries of residuals[{name!r}]")
    total = torch.zeros(size, dtype=torch.float64)
    for pieces in parts:
        add_pieces(total, pieces)
    return (total / replicas).to(next(iter(parts[0].values())).dtype)


def put_together(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of a whole replica, to be cut anew, from the states of its ranks.

    ``"shards"`` in a state has the shapes of its pieces: consecutive ranks of a replica have
    consecutive rows of every parameter and of its residual.
    """
    # Checksums of pieces make none of a whole.
    whole = {key: value for key, value in pieces[0].items() if key not in ("shards", "shared")}
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
    """One tensor of the ranks' shards, with zeros for a rank without one; a buffer is whole on
    every rank.
    """
    there = next(piece[part][name] for piece in pieces if name in piece[part])
    if name not in pieces[0]["shards"]:
        return there
    flat = [
        (
            piece[part][name].reshape(-1)
            if name in piece[part]
            else there.new_zeros(math.prod(piece["shards"][name]))
        )
        for piece in pieces
    ]
    # Residuals are flat.
    return torch.cat(flat) if part == "residuals" else torch.cat(flat).view(-1, *there.shape[1:])


def checksum_of_groups(states: Iterable[Mapping[str, Any]]) -> int:
    """A checksum of the hyperparameters in optimizer states, to notice edits in a checkpoint."""
    plain = (int, float, str, list, tuple, Tensor)  # of others `repr` may have an address
    groups = [group for state in states for group in state.get("param_groups", [])]
    kept = [
        {key: value for key, value in group.items() if isinstance(value, plain) and key != "params"}
        for group in groups
    ]
    return zlib.crc32(repr(apply_to_collection(kept, Tensor, Tensor.tolist)).encode())


def with_edited_groups(
    own: Sequence[Mapping[str, Any]],
    theirs: Sequence[Mapping[str, Any]],
    saved_checksum: int | None,
) -> Sequence[Mapping[str, Any]]:
    """A rank's own states of the optimizers, with the hyperparameters of the checkpoint if these
    have been edited.

    ``theirs`` are the states in the checkpoint. ``saved_checksum`` is of the hyperparameters that
    were saved; None if it is not known. If ``theirs`` are others, such as none, because a hook has
    changed them, each rank continues with those.
    """
    their_groups, own_groups = (
        [len(one.get("param_groups", ())) for one in states] for states in (theirs, own)
    )
    if their_groups != own_groups:
        rank_zero_warn(
            "The checkpoint's optimizers are missing or were changed since the save. Every rank"
            " continues with those of the checkpoint."
        )
        return theirs
    if saved_checksum in (None, checksum_of_groups(theirs)):
        return own
    rank_zero_warn(
        "The checkpoint's optimizers have other hyperparameters, such as the learning rate, than"
        " were saved. Every rank continues with those of the checkpoint."
    )
    states = []
    for their, mine in zip(theirs, own, strict=True):
        pairs = zip(their["param_groups"], mine["param_groups"], strict=True)
        states.append(
            {
                **mine,
                "param_groups": [{**edited, "params": kept["params"]} for edited, kept in pairs],
            }
        )
    return states
