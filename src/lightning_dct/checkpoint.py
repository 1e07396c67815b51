"""Where each rank's compression state lies beside a Lightning checkpoint, and how it is carried to another world size.

    epoch=3.ckpt                          Lightning's file, with a note saying which state belongs to it
    epoch=3.ckpt.dct/
        000000001200-rank-0-of-2.pt       residuals, thresholds and counters of rank 0 after 1200 synchronisations
        000000001200-rank-1-of-2.pt
        000000001200-rows/            embedding rows that are spread over the ranks, where there are any

Every rank writes its own file before Lightning's is written, under a name that holds the number of synchronisations:
a job killed in the middle of overwriting a checkpoint finds the old file together with the old state.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from torch import Tensor

from lightning_dct.gradients.residual import add_pieces, pieces_extent
from lightning_dct.state_file import read_checked

# What a rank's state says is held back: of its own gradients by name, and of sums it owns by name and first entry.
_HELD_BACK = ("residuals", "owned")
CHECKPOINT_KEY = "lightning_dct"
FORMAT_VERSION = 1


def make_note(
    world_size: int, synchronisations: int, has_state: bool = True, has_rows: bool = False, stages: int = 1
) -> dict[str, int]:
    """What Lightning's checkpoint says about what lies beside it.

    Args:
        world_size: Number of ranks.
        synchronisations: Completed gradient synchronisations.
        has_state: Whether the ranks' compression state is there; not with weights alone.
        has_rows: Whether embedding rows are.
        stages: Over how many ranks the parameters are spread.
    """
    note = {"format_version": FORMAT_VERSION, "world_size": world_size, "synchronisations": synchronisations}
    if stages > 1:
        note["stages"] = stages
    return note | {"has_state": int(has_state), "has_rows": int(has_rows)}


def state_folder(checkpoint_path: str) -> str:
    """The folder that holds the ranks' files of a checkpoint."""
    return f"{checkpoint_path}.dct"


def state_path(checkpoint_path: str, note: Mapping[str, int], rank: int) -> str:
    """The file of one rank."""
    name = f"{note['synchronisations']:012d}-rank-{rank}-of-{note['world_size']}.pt"
    return f"{state_folder(checkpoint_path)}/{name}"


def rows_path(checkpoint_path: str, note: Mapping[str, int]) -> str:
    """The folder with the embedding rows."""
    return f"{state_folder(_behind_link(checkpoint_path))}/{note['synchronisations']:012d}-rows"


def write_state(checkpoint_io: CheckpointIO, path: str, note: Mapping[str, int], rank: int, state: Any) -> None:
    """Write one rank's state beside the checkpoint that ``path`` names."""
    checkpoint_io.save_checkpoint(state, state_path(path, note, rank))


def read_state(
    checkpoint_io: CheckpointIO, path: str, note: Mapping[str, int], rank: int, world_size: int, stages: int = 1
) -> dict[str, Any]:
    """Read the state a rank starts from: its own, or what follows from everybody's when the number of ranks differs.

    Args:
        checkpoint_io: What reads files.
        path: The checkpoint.
        note: What the checkpoint says about its state.
        rank: This rank.
        world_size: Ranks that take part now.
        stages: Over how many of them the parameters are spread now.

    Raises:
        ValueError: Another version of the format has written it, or it is damaged.
        FileNotFoundError: The files are not beside the checkpoint.
    """
    if note.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"The compression state of {path!r} has format version {note.get('format_version')!r}; this lightning_dct"
            f" reads version {FORMAT_VERSION}. Resume with the version that saved it."
        )
    path = _behind_link(path)
    states = []
    saved_stages = note.get("stages", 1)
    same_layout = (world_size, stages) == (note["world_size"], saved_stages)
    for saved_rank in [rank] if same_layout else range(note["world_size"]):
        file = state_path(path, note, saved_rank)
        try:
            states.append(read_checked(checkpoint_io, file))
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"The checkpoint {path!r} was saved with compression state, but {file!r} is not there. Put the folder"
                f" {state_folder(path)!r} beside the checkpoint, or start from the checkpoint's weights alone: load"
                " them into the model and fit without `ckpt_path`."
            ) from error
    return merge_states(states, saved_stages)


def merge_states(states: Sequence[Mapping[str, Any]], stages: int = 1) -> dict[str, Any]:
    """The state a rank starts from, made of those it has read.

    What the ranks hold back, of their own gradients or of sums they own, enters the model as its *mean* over the ranks.
    Giving every rank of a new world that mean as the residual of its own gradients conserves it whatever the two world
    sizes are. It is taken in fp64.

    Args:
        states: One state (its own), or those of all ranks of the saved world.
        stages: Over how many ranks the parameters were spread: so many ranks together held one replica.

    Returns:
        The state, where each entry of ``"modules"`` is the list of what the states say about that module.
    """
    modules = {name: [state["modules"][name] for state in states] for name in states[0].get("modules", {})}
    merged = {**states[0], "modules": modules}
    if len(states) == 1:
        return merged
    names = {name for state in states for part in _HELD_BACK for name in state.get(part, {})}
    merged["residuals"] = {name: _mean_held_back(states, name, len(states) // stages) for name in sorted(names)}
    merged["owned"] = {}
    if stages > 1:
        # Each rank has known the thresholds of its own stage only.
        merged["thresholds"] = {
            part: {name: value for state in reversed(states) for name, value in state["thresholds"][part].items()}
            for part in states[0]["thresholds"]
        }
    return merged


def _behind_link(path: str) -> str:
    # ModelCheckpoint(save_last="link") leaves a link: the files lie beside what it points at.
    return os.path.realpath(path) if os.path.islink(path) else path


def _mean_held_back(states: Sequence[Mapping[str, Any]], name: str, replicas: int) -> Tensor:
    """What the ranks hold back of a tensor, of their own gradients and of sums they own, over the number of replicas.

    Raises:
        ValueError: The states disagree on the tensor's size.
    """
    residuals = [state["residuals"][name] for state in states if name in state["residuals"]]
    owned = [state["owned"][name] for state in states if name in state.get("owned", {})]
    dtype = residuals[0].dtype if residuals else next(iter(owned[0].values())).dtype
    size = max([residual.numel() for residual in residuals] + [pieces_extent(pieces) for pieces in owned])
    total = torch.zeros(size, dtype=torch.float64)
    for residual in residuals:
        total += residual.flatten()
    for pieces in owned:
        total = add_pieces(total, pieces, size)
    return (total / replicas).to(dtype)
