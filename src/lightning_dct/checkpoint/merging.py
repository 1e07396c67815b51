"""The state that each rank starts from: at another world size, made of the states of all ranks that saved."""

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_dct.checksums import CheckpointError
from lightning_dct.compress.error_feedback import add_pieces, pieces_extent

# Parts of a state without a meaning in another layout. A mean of the ranks' optimizers or loss scalers would continue
# none of them, and of shards they have other rows. Updates in flight are still in the ranks' own weights: sent again.
OF_ONE_RANK = ("optimizers", "scaler", "in_flight")


def merge_states(states: Sequence[Mapping[str, Any]], stages: int = 1) -> dict[str, Any]:
    """The state a rank starts from, made of the states that it has read.

    The ranks' residuals, of their own gradients and of the sums they own, enter the model as their *mean* over the
    ranks, in fp64. Every rank of a new world starts with that mean, which conserves it for any two world sizes.

    ``states`` is one state (the rank's own), or those of all ranks of the saved world, of which ``stages`` ranks
    together held one replica. In the result each entry of ``"modules"`` is the list of that module's states. Parts that
    are ``OF_ONE_RANK`` are those of the first.
    """
    modules = {name: [state["modules"][name] for state in states] for name in states[0].get("modules", {})}
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
        merged["shared"] = {name: value for state in states for name, value in state.get("shared", {}).items()}
        merged["thresholds"] = {
            part: {name: value for state in reversed(states) for name, value in state["thresholds"][part].items()}
            for part in states[0]["thresholds"]
        }
    return merged


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
    # Buffers may be counts or flags, of which there is no mean.
    exact = {name: one for name, one in first.items() if not (one.is_floating_point() or one.is_complex())}
    return {name: (tensor / replicas).to(first[name].dtype) for name, tensor in total.items()} | exact


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


def put_together(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of a whole replica, to be cut anew, from the states of its ranks.

    ``"shards"`` in a state has the shapes of its pieces: consecutive ranks of a replica have consecutive rows of every
    parameter and of its residual.
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
    """One tensor of the ranks' shards, with zeros for a rank without one; a buffer is whole on every rank."""
    there = next(piece[part][name] for piece in pieces if name in piece[part])
    if name not in pieces[0]["shards"]:
        return there
    flat = [
        piece[part][name].reshape(-1) if name in piece[part] else there.new_zeros(math.prod(piece["shards"][name]))
        for piece in pieces
    ]
    return torch.cat(flat) if part == "residuals" else torch.cat(flat).view(-1, *there.shape[1:])  # residuals are flat


def checksum_of_groups(states: Iterable[Mapping[str, Any]]) -> int:
    """A checksum of the hyperparameters in optimizer states, to notice edits in a checkpoint."""
    plain = (int, float, str, list, tuple, Tensor)  # of others `repr` may have an address
    groups = [group for state in states for group in state.get("param_groups", [])]
    kept = [
        {key: value for key, value in group.items() if isinstance(value, plain) and key != "params"} for group in groups
    ]
    return zlib.crc32(repr(apply_to_collection(kept, Tensor, Tensor.tolist)).encode())


def with_edited_groups(
    own: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], saved_checksum: int | None
) -> Sequence[Mapping[str, Any]]:
    """A rank's own states of the optimizers, with the hyperparameters of the checkpoint if these have been edited.

    ``theirs`` are the states in the checkpoint. ``saved_checksum`` is of the hyperparameters that were saved; None if
    it is not known. If ``theirs`` are others, such as none, because a hook has changed them, each rank continues with
    those.
    """
    their_groups, own_groups = ([len(one.get("param_groups", ())) for one in states] for states in (theirs, own))
    if their_groups != own_groups:
        rank_zero_warn(
            "The checkpoint's optimizers are missing or were changed since the save. Every rank continues with those of"
            " the checkpoint."
        )
        return theirs
    if saved_checksum in (None, checksum_of_groups(theirs)):
        return own
    rank_zero_warn(
        "The checkpoint's optimizers have other hyperparameters, such as the learning rate, than were saved. Every rank"
        " continues with those of the checkpoint."
    )
    states = []
    for their, mine in zip(theirs, own, strict=True):
        pairs = zip(their["param_groups"], mine["param_groups"], strict=True)
        groups = [{**group, "params": my_group["params"]} for group, my_group in pairs]
        states.append({**mine, "param_groups": groups})
    return states
