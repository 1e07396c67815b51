"""Real processes that are killed, stopped, slow, and started again."""

import signal
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader

from distributed.harness import Ranks
from elastic.jobs import Job, Net, examples

# Without importing it here, because it prints what it does unless it is told before.
pytestmark = pytest.mark.skipif(
    find_spec("torchft") is None, reason="torchft has wheels for some platforms only"
)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """``job(3, 200)``: three ranks, started, that train 200 steps; killed after the test."""
    made: list[Job] = []

    def make(
        ranks: int, steps: int, only: dict[int, dict[str, Any]] | None = None, **more: Any
    ) -> Job:
        made.append(Job(ranks, tmp_path, steps, **more))
        for rank in range(ranks):
            made[-1].start(rank, **(only or {}).get(rank, {}))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def check_alike(job: Job, ends: dict[int, list[str]], steps: int) -> None:
    """The ranks have had the same shared weights after every exchange, and end with them at the
    step that was asked.
    """
    digests = job.digests()
    assert digests
    assert all(len(alike) == 1 for alike in digests.values()), {
        k: v for k, v in digests.items() if len(v) > 1
    }
    assert {int(end[0]) for end in ends.values()} == {steps}
    assert len({end[1] for end in ends.values()}) == 1
    assert len({end[2] for end in ends.values()}) == 1  # the loss of all validation data


def resume(strategy: str, path: str, steps: int) -> tuple[int, float]:
    """Continue from a checkpoint with another strategy; the step, and the loss before."""
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_steps=steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    net = Net()
    before = float(
        trainer.validate(
            net, DataLoader(examples(500, 2), batch_size=100), ckpt_path=path, verbose=False
        )[0]["loss"]
    )
    trainer.fit(net, DataLoader(examples(4000, 1), batch_size=16, shuffle=True), ckpt_path=path)
    return trainer.global_step, before


def test_ranks_are_killed_and_join_again(
    job: Callable[..., Job], ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    steps = 400
    run = job(3, steps, slow=0.02, every=100)
    run.wait_for(0, 40)
    run.kill(1)
    reached = int(run.rows(0)[-1][2])
    run.wait_for(0, reached + 20)  # the others have gone on
    assert any(row[3] == "2" for row in run.rows(0))
    before = len(run.rows(1))
    run.start(1)
    run.wait_for(1, reached + 20)
    assert int(run.rows(1)[before][2]) >= reached  # it has joined where the others were
    run.kill(0)  # the first one, too
    reached = int(run.rows(2)[-1][2])
    run.wait_for(2, reached + 20)
    run.start(0)
    run.wait_for(0, reached + 20)
    run.hurry()
    ends = run.end()
    check_alike(run, ends, steps)
    for strategy in ("dct", "ddp"):
        answers = ranks(2).run(resume, strategy, str(tmp_path / "last.ckpt"), steps + 5)
        assert [step for step, _ in answers] == [steps + 5] * 2
        assert answers[0][1] == pytest.approx(float(ends[0][2]), abs=1e-5)


def test_a_stopped_rank_comes_back_and_keeps_what_it_has_moved(job: Callable[..., Job]) -> None:
    steps = 300
    run = job(3, steps, slow=0.05)
    run.wait_for(2, 40)
    run.kill(2, signal.SIGSTOP)
    # Since its latest exchange it may have made some steps more, fewer than 20.
    stopped_at = int(run.rows(2)[-1][2])
    run.wait_for(0, stopped_at + 60)
    run.kill(2, signal.SIGCONT)
    run.wait_for(2, stopped_at + 60)
    run.hurry()
    ends = run.end()
    check_alike(run, ends, steps)
    assert int(ends[2][3]) >= 40  # steps that it has passed over


def test_a_rank_that_is_asked_to_end_hands_over_what_it_has_not_sent(
    job: Callable[..., Job],
) -> None:
    run = job(3, 200, slow=0.02)
    run.wait_for(2, 60)
    run.kill(2, signal.SIGTERM)
    run.hurry()
    gone = run.processes.pop(2)
    gone.join(60)
    assert gone.exitcode == 0  # as Lightning ends on that signal
    assert "rank 2 hands over what it has not sent, and leaves" in run.log(2)
    check_alike(run, run.end(), 200)


def test_the_lighthouse_is_killed_and_comes_back(job: Callable[..., Job]) -> None:
    run = job(3, 400, slow=0.1)
    run.wait_for(0, 20)
    run.lighthouse.kill()
    run.lighthouse.wait()
    reached = int(run.rows(0)[-1][2])
    rounds = int(run.rows(0)[-1][0])
    time.sleep(3.0)
    assert int(run.rows(0)[-1][0]) <= rounds + 1
    run.light()
    run.wait_for(0, reached + 8)  # beyond the round that may have been under way
    # Whoever is much faster than the others passes them, so in a hurry few rounds may have all
    # three.
    run.wait_for_rounds_of_all(0, rounds + 1, 11)
    run.hurry()
    ends = run.end()
    check_alike(run, ends, 400)
    assert sum(row[3] == "3" and int(row[0]) > rounds + 1 for row in run.rows(0)) > 10


def test_without_a_lighthouse_ranks_train_on_alone(job: Callable[..., Job]) -> None:
    run = job(2, 120, slow=0.02)
    run.wait_for(0, 40)
    run.lighthouse.kill()
    ends = run.end()
    assert {int(end[0]) for end in ends.values()} == {120}
    assert int(run.rows(0)[-1][2]) < 120
    assert f"the lighthouse at {run.address} does not answer" in " ".join(ends[0])


def test_a_slow_rank_passes_over_steps(job: Callable[..., Job]) -> None:
    steps = 160
    run = job(3, steps, only={1: {"slow": 0.5}}, slow=0.05, local_steps=8)
    ends = run.end()
    check_alike(run, ends, steps)
    assert int(ends[1][3]) > (steps - 8) / 4
    assert min(int(ends[0][3]), int(ends[2][3])) < steps / 4


def test_batches_without_an_optimizer_step_are_not_steps_passed_over(
    job: Callable[..., Job],
) -> None:
    ends = job(1, 50, accumulate=2).end()
    assert ends[0][0] == "50"
    assert ends[0][3] == "0"


def test_all_ranks_write_where_the_first_one_does(job: Callable[..., Job], tmp_path: Path) -> None:
    """Also with a split point, of which a joiner takes the state of a peer."""
    run = job(2, 200, slow=0.02, finds_folder=True, splits=True)
    run.wait_for(1, 20)
    run.kill(1)
    reached = int(run.rows(1)[-1][2])
    run.start(1)
    run.wait_for(1, reached + 1)
    run.hurry()
    run.end()
    rows = [(tmp_path / f"folders-{rank}.txt").read_text().split() for rank in range(2)]
    assert rows[0] == [str(tmp_path / "lightning_logs" / "of-0" / "checkpoints")]
    assert rows[1] == 2 * rows[0]  # at a common start, and as a joiner


def test_a_rank_does_not_join_another_fit(job: Callable[..., Job]) -> None:
    run = job(2, 200, slow=0.02)
    run.wait_for(1, 20)
    run.kill(1)
    run.start(1, fits_before=1)
    other = run.processes.pop(1)
    other.join(120)
    assert other.exitcode == 1
    assert (
        "This rank is in fit 2 of its process, and the run that it would join is in fit 1."
        in run.log(1)
    )
    run.hurry()
    run.end()


def test_all_ranks_resume_from_a_checkpoint(job: Callable[..., Job], tmp_path: Path) -> None:
    run = job(2, 60, every=20)
    check_alike(run, run.end(), 60)
    for path in tmp_path.glob("*-?.txt"):
        path.unlink()
    again = job(2, 120, ckpt_path=str(tmp_path / "last.ckpt"))
    check_alike(again, again.end(), 120)
    assert int(again.rows(0)[0][2]) > 60
