"""Ranks that do not do the same end within seconds and say so, instead of waiting for each
other.
"""

from pathlib import Path

import pytest

from reliability.apart import train
from reliability.processes import run_to_the_end

# Far more than all of it takes on a quiet machine, and far less than a process group's timeout.
TIMEOUT_S = 400
SAYS = {
    "fewer batches": [
        "rank 0 at the end of training after 9 steps",
        "in optimizer step 10",
        "number of batches",
    ],
    "fewer batches, then a checkpoint": [
        "rank 0 at a reduction, of logged values or for a checkpoint, after 9 steps"
    ],
    "fewer batches, and a log": [
        " after 9 steps and rank 1 at an exchange of logged values after 9 steps"
    ],
    "fewer batches, and no buffers": [
        "rank 0 at the end of training after 9 steps",
        "in optimizer step 10",
    ],
    "fewer batches, only one": [
        "rank 0 at the end of training after 1 steps and rank 1 at an exchange in forward"
    ],
    "fewer batches, two epochs": [
        "rank 0 at epoch 1 after 9 steps and rank 1 at an exchange of ",
        "in optimizer step 10",
    ],
    "fewer batches, two epochs, no exchange there": [
        "rank 0 at epoch 1 after 9 steps and rank 1 at epoch 1 after 12"
    ],
    "fewer steps of one": [
        (
            "rank 0 at an exchange of 2 parameters, step 5 of optimizer 0, in optimizer step 8 and"
            " rank 1 at an"
        ),
        "parameters, step 4 of optimizer 1, in optimizer step 8",
        "Step the same optimizers in the same order",
    ],
    "skips a step": [
        (
            "rank 0 at an exchange of 6 parameters, in optimizer step 6, in batch 6 of epoch 0 and"
            " rank 1 at an exchange of 6 parameters, in optimizer step 6, in batch 5 of epoch 0"
        ),
        (
            "Rank 0 has made fewer optimizer steps in as many batches. Decide alike on all ranks"
            " whether to step"
        ),
    ],
    "skips a step of local steps": [
        (
            "in optimizer step 6, in batch 6 of epoch 0 and rank 1 at an exchange of 6 parameters,"
            " in optimizer step 6, in batch 5 of epoch 0"
        ),
        "Rank 0 has made fewer optimizer steps",
    ],
    "stop": [
        "rank 0 at the end of training after 5 steps, because its `trainer.should_stop` is set"
    ],
    "stop, with updates in flight": [
        "rank 0 at the end of training after 5 steps",
        "the arrival of updates in optimizer",
    ],
    "gathering, with updates in flight": [
        "gathered values after 4 steps",
        "the arrival of updates in optimizer step 6",
    ],
    "gathering": [
        (
            "rank 0 at an exchange of gathered values after 4 steps and rank 1 at an exchange of 6"
            " parameters"
        ),
        "number of batches",
    ],
    "once more, log": [
        "rank 0 at an exchange of logged values after 4 steps and rank 1 at an exchange of 6"
        " parameters"
    ],
    "once more, gathering in test": [
        "rank 0 at an exchange of gathered values in `test` and rank 1 at the end in `test`"
    ],
    "log_dir in validate": [
        "rank 0 at a broadcast in `validate` and rank 1 at the end in `validate`"
    ],
    "gathering in predict": [
        "rank 0 at an exchange of gathered values in `predict` and rank 1 at the end in `predict`"
    ],
    "rows, looked up alone": [
        "rank 0 at an exchange of exact rows of 'tables' after 12 steps and rank 1 at "
    ],
    "rows, once more exact": [
        "exchange of exact rows of 'tables' after 4 steps and rank 1 at an exchange of rows of"
    ],
    "rows, in other order": [
        "exchange of rows of 'others' after 4 steps and rank 1 at an exchange of rows of 'tables'"
    ],
    "rows, not looked up": [
        "rank 0 at an exchange of ",
        " and rank 1 at an exchange of rows of 'tables' after 4",
    ],
    "barrier of its own": [
        "rank 0 at `barrier`, called in ",
        "apart.py, line ",
        "in optimizer step 5",
    ],
    "barrier of its own in validation": ["rank 0 at `barrier`, called in ", "apart.py, line "],
    "error in a search for a rate": [
        "rank 0 at a checkpoint to load after 4 steps and rank 1 at an exchange of "
    ],
    "fabric, fewer batches": [
        "rank 0 at an evaluation and rank 1 at an exchange of 2 parameters, in optimizer step 10"
    ],
    "fabric, barrier": [
        "rank 0 at a barrier and rank 1 at an exchange of 2 parameters, in optimizer step 10"
    ],
    "fabric, gathering": [
        "at an exchange of gathered values and rank 1 at an exchange of 2 parameters"
    ],
    "fabric, first step of another optimizer": [
        "and rank 1 at the first step of an optimizer",
    ],
    "loop, fewer steps": [
        "rank 0 at an evaluation and rank 1 at an exchange of 2 parameters, in optimizer step 12"
    ],
    "loop, evaluation": [
        "rank 0 at an evaluation and rank 1 at an exchange of 2 parameters, in optimizer step 10"
    ],
    "more parameters": [
        "an exchange of 8 parameters, 'extra.weight', 'extra.bias' added, in optimizer step 5",
        "`param_groups`",
    ],
    "unfreeze": [
        "rank 0 at 8 trainable parameters",
        "and rank 1 at an exchange in forward after 5 steps",
        "`requires_grad`",
    ],
    "stage, stop": [
        "`trainer.should_stop` is set and rank 1 at an exchange of activations in training_step"
        " after 5"
    ],
    "stage, save": [
        "rank 0 at a checkpoint after 5 steps and rank 1 at an exchange of activations in"
        " training_step"
    ],
    "stage, decide": [
        "rank 0 at a common decision after 5 steps and rank 1 at an exchange of activations"
    ],
    "stage, gathering at the end": [
        "gathered values after 12 steps and rank 1 at the end of fit after 12 steps"
    ],
    "stage, save at the end": [
        "rank 0 at a checkpoint after 12 steps and rank 1 at the end of fit after 12 steps"
    ],
    "stage, fewer batches": [
        "and rank 1 at an exchange of activations in training_step after 9 steps"
    ],
    "stage, fewer batches of validation": [
        " and rank 1 at an exchange of activations in validation_step after 12 steps"
    ],
    "shard, stop": [
        "`trainer.should_stop` is set and rank 1 at an exchange in forward after 5 steps"
    ],
    "shard, gathering": [
        "rank 0 at an exchange of gathered values after 4 steps and rank 1 at an exchange in"
        " forward"
    ],
    "shard, gathering after forward": [
        "gathered values after 4 steps and rank 1 at an exchange in backward after 4"
    ],
    "shard, gathering after backward": [
        "rank 0 at an exchange of gathered values after 4 steps and rank 1 at an"
    ],
}


@pytest.mark.parametrize("way", SAYS)
def test_all_ranks_end_and_say_how_they_differ(way: str, tmp_path: Path) -> None:
    """Oracle: failing exit statuses, and in every rank's output what rank 0 did and what another
    one did.
    """
    ranks = 3 if way == "fewer batches" else 2
    ended = run_to_the_end(
        train,
        way,
        str(tmp_path),
        world_size=ranks,
        failing=-1,
        folder=tmp_path,
        timeout_s=TIMEOUT_S,
    )
    for rank, (exit_status, _, output) in enumerate(ended):
        assert exit_status == 1, f"rank {rank}: {exit_status}\n{output}"
        for words in ("The ranks are out of step: rank 0 at ", " and rank ", *SAYS[way]):
            assert words in output, output
        assert "has died" not in output
