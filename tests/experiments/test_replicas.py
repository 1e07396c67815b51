"""Replicas in one process: the bits of real ranks, whatever the exchange, and the table of the
command.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch import seed_everything
from torch import Tensor

import replicas
from differences import assert_same
from distributed.training import Watch, trainer_for
from replicated import graphs, training
from replicated.engines import Engines
from replicated.side_by_side import SideBySide, train_side_by_side
from replicated.training import (
    CHECKS,
    CONF,
    Job,
    Prepared,
    Replicas,
    gradients_of_all,
    is_last,
    mean_loss,
    rows_of_validation,
    train,
    validated_after,
)

STEPS = 14
TINY = (
    "experiment=lm",
    "data=documentation",
    "data.context_length=16",
    "data.batch_size=4",
    "model.width=16",
)
TINY += (
    "model.num_layers=1",
    "model.num_heads=2",
    "model.warmup_steps=4",
    "model.learning_rate=0.01",
)
DIGITS = (
    "experiment=perceptron",
    "data.train_images=256",
    "data.val_images=64",
    "data.batch_size=4",
    "model.width=24",
)
DCT = ("strategy=dct", "strategy.local_steps=2", "strategy.density=0.2", "strategy.warmup_steps=5")


def train_for_real(
    overrides: tuple[str, ...], steps: int, folder: str
) -> tuple[list[float], dict[str, Tensor], Any]:
    """On a rank: what `train.py` does. Its losses, the weights after fit, and the bytes."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", [*overrides, f"trainer.max_steps={steps}"])
    config.paths.root_dir = config.paths.output_dir = folder
    seed_everything(config.seed, workers=True)
    data = hydra.utils.instantiate(config.data)
    module = hydra.utils.instantiate(config.model)
    strategy = hydra.utils.instantiate(config.strategy)
    watch = Watch()
    lengths = {"max_steps": steps, "max_epochs": -1, "limit_val_batches": 0}
    trainer_for(strategy, callbacks=[watch], **lengths).fit(module, datamodule=data)
    return (
        watch.losses,
        {name: p.detach().clone() for name, p in module.named_parameters()},
        strategy.traffic.totals,
    )


def in_one_process(job: Job) -> tuple[list[Tensor], dict[str, Tensor]]:
    replicas = Replicas(Prepared(job))
    losses = [replicas.step().clone() for _ in range(job.steps)]
    return losses, replicas.shared_weights()


@pytest.mark.parametrize(
    "own",
    [
        (*TINY, *DCT, "strategy.exchange=all_gather"),
        (*TINY, *DCT, "strategy.exchange=two_phase"),
        (
            *TINY,
            "strategy=dct",
            "strategy.local_steps=1",
            "strategy.density=0.1",
            "model.momentum=0.9",
        ),
        (*TINY, "strategy=dct"),  # as the length of the run allows
        (
            *TINY,
            "strategy=dct",
            "strategy.local_steps=4",
            "strategy.warmup_steps=2",
            "strategy.density=1.0",
        ),
        (*DIGITS, "strategy=dct", "model.optimizer=Muon"),
    ],
    ids=["all_gather", "two_phase", "sgd", "defaults", "dense", "perceptron"],
)
def test_replicas_have_the_bits_of_real_ranks(
    ranks: Any, tmp_path: Path, own: tuple[str, ...]
) -> None:
    """Two gloo ranks under the Trainer, and two in one process: the same losses and weights, bit
    for bit, and as many bytes.
    """
    overrides = (*own, "seed=3")
    real = ranks(2).run(train_for_real, overrides, STEPS, str(tmp_path))
    losses, weights = in_one_process(Job(overrides, ranks=2, steps=STEPS))
    for rank, (real_losses, real_weights, totals) in enumerate(real):
        assert [float(loss[rank]) for loss in losses] == real_losses
        assert_same(weights, real_weights)
        assert totals.bytes_dense > totals.bytes_sent > 0
    figures = train(Job(overrides, ranks=2, steps=STEPS, val_rows=8))
    assert figures["ratio"] == real[0][2].compression_ratio


@pytest.mark.parametrize(
    "own",
    [
        ("sparse_loco", "sync_every=3", "top_k=40"),
        ("local_sgd", "sync_every=3"),
        ("diloco", "sync_every=4"),
        ("diloco", "sync_every=4", "fragments=2", "delay=1", "mixing=0.5"),
    ],
    ids=" ".join,
)
def test_replicas_follow_the_methods_of_others(
    ranks: Any, tmp_path: Path, own: tuple[str, ...]
) -> None:
    """As on two real ranks, whose manager is torchft's."""
    if own[0] != "sparse_loco":
        pytest.importorskip("torchft")
    overrides = (
        *TINY,
        "seed=3",
        f"strategy={own[0]}",
        *(f"strategy.method.{word}" for word in own[1:]),
    )
    real = ranks(2).run(train_for_real, overrides, STEPS, str(tmp_path))
    losses, weights = in_one_process(Job(overrides, ranks=2, steps=STEPS))
    for rank, (real_losses, real_weights, totals) in enumerate(real):
        assert [float(loss[rank]) for loss in losses] == real_losses
        torch.testing.assert_close(weights, real_weights)
        assert totals.bytes_dense > totals.bytes_sent > 0
    figures = train(Job(overrides, ranks=2, steps=STEPS, val_rows=8))
    assert figures["ratio"] == real[0][2].compression_ratio


def test_a_replica_that_fails_lets_no_other_wait() -> None:
    replicas = Replicas(
        Prepared(Job((*TINY, "strategy=sparse_loco", "strategy.method.sync_every=1"), 3, STEPS))
    )
    replicas.step()

    def fail(*_: Any) -> None:
        raise ArithmeticError("the third one")

    replicas.optimizers[2].register_step_pre_hook(fail)
    with pytest.raises(ArithmeticError, match="the third one"):
        replicas.step()


@pytest.mark.parametrize(
    ("ranks", "own"),
    [
        (2, (*TINY, *DCT, "strategy.exchange=all_gather")),
        (3, (*TINY, *DCT, "strategy.exchange=two_phase", "strategy.refresh_every=5")),
        (3, (*TINY, "strategy=dct", "strategy.exchange=two_phase", "strategy.density=0.2")),
        (
            2,
            (
                *TINY,
                "strategy=dct",
                "strategy.local_steps=1",
                "strategy.density=0.1",
                "model.momentum=0.9",
            ),
        ),
        (2, (*DIGITS, "strategy=dct", "model.optimizer=Adam")),
    ],
    ids=["all_gather", "two_phase", "lengthened", "sgd", "perceptron"],
)
def test_stacked_replicas_have_the_bits_of_modules(ranks: int, own: tuple[str, ...]) -> None:
    """As a GPU trains them: the same losses, weights and bytes, if gradients come from the same
    call for all.
    """
    job = Job((*own, "seed=3"), ranks=ranks, steps=2 * STEPS, val_rows=8)
    modules = Replicas(Prepared(job))
    beside = SideBySide([job])
    gradients_of = gradients_of_all(modules.prepared.module)

    def gradients(batches: dict[str, Tensor]) -> Tensor:
        named = [dict(module.named_parameters()) for module in modules.modules]
        found, losses = gradients_of(
            {n: torch.stack([o[n].detach() for o in named]) for n in named[0]}, batches
        )
        for rank, mine in enumerate(named):
            for name, parameter in mine.items():
                parameter.grad = found[name][rank]
        return losses

    modules.gradients = gradients  # type: ignore[method-assign]
    for step in range(job.steps):
        losses = modules.step()
        beside.step()
        assert torch.equal(beside.banks[0].losses, losses), step
    (one,) = beside.trainings
    assert_same(one.shared_weights(), modules.shared_weights())
    assert modules.engines is not None
    assert one.engines is not None
    assert [own.totals.bytes_sent for own in one.engines.traffic] == [
        own.totals.bytes_sent for own in modules.engines.traffic
    ]


class PretendedGraph:
    """A graph without a card: what is recorded runs at once, and a replay is noted."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


@contextmanager
def recording_at_once(graph: graphs.ExchangeGraph) -> Iterator[None]:
    """Pretend to record; torch needs a card for that."""
    assert len({one.synchronisations for one in graph._synchronizers}) == 1  # all have come
    yield


def test_engines_record_exchanges_of_a_kind_once_and_then_replay_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to the first replay weights are those of exchanges that nothing records. This is the order
    of calls only: a card says whether graphs have the bits (``make gpu``).
    """
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PretendedGraph)
    monkeypatch.setattr(graphs.ExchangeGraph, "_recording", recording_at_once)
    overrides = (*TINY, "strategy=dct", "strategy.local_steps=2", "strategy.density=0.2")
    prepared = Prepared(Job((*overrides, "strategy.warmup_steps=0", "seed=3"), 3, 40))
    plain = Replicas(prepared)
    monkeypatch.setattr(training, "Engines", partial(Engines, kind=graphs.RecordedUpdates))
    recorded = Replicas(prepared)
    own = graphs.Graphs()
    for one in recorded.engines.synchronizers:
        one.graphs = own
        one.eager = 3
        own.synchronizers.append(one)
    for exchange in range(1, 7):
        for _ in range(2):
            plain.step()
            recorded.step()
        if exchange <= 4:
            assert_same(recorded.shared_weights(), plain.shared_weights())
        assert [one._graph.replays for one in own.by_kind.values()] == [exchange - 3] * (
            exchange > 3
        )
    sent = {one.traffic.totals.bytes_sent for one in recorded.engines.synchronizers}
    assert sent == {one.traffic.totals.bytes_sent for one in plain.engines.synchronizers}


def test_trainings_side_by_side_do_not_touch_each_other() -> None:
    """With other seeds, rates, numbers of ranks and dense trainings beside it, a training is what
    it is alone.
    """
    dct = (*TINY, *DCT, "strategy.density=0.9")
    jobs = [
        Job((*dct, f"seed={seed}"), ranks, STEPS, val_rows=8)
        for seed, ranks in ((3, 2), (4, 2), (3, 4))
    ]
    jobs += [
        Job((*TINY, "strategy=ddp", "seed=3", f"model.learning_rate={rate}"), 2, STEPS, val_rows=8)
        for rate in (0.01, 0.02)
    ]
    reported: list[int] = []
    found = train_side_by_side(jobs, lambda step, losses: reported.append(step))
    assert reported[-1] == STEPS
    for job, figures in zip(jobs, found, strict=True):
        (alone,) = train_side_by_side([job], lambda *_: None)
        assert figures["loss"] == pytest.approx(alone["loss"], rel=1e-2)
        assert figures["ratio"] == alone["ratio"]
        assert figures["settings"] == alone["settings"]
    assert len({figures["loss"] for figures in found}) == len(jobs)
    modules = train(jobs[0])
    assert found[0].keys() == modules.keys()
    assert found[0]["ratio"] == modules["ratio"]


def test_trainings_of_other_modules_and_data_are_not_stacked() -> None:
    others = ((), ("model.num_heads=1",), ("data.context_length=8",), ("model.width=8",))
    jobs = [Job((*TINY, "strategy=ddp", "seed=3", *own), 2, 4, val_rows=8) for own in others]
    together = train_side_by_side(jobs, lambda *_: None)
    for job, figures in zip(jobs, together, strict=True):
        assert figures["loss"] == pytest.approx(train(job)["loss"], rel=1e-5), job.overrides
    assert len({figures["loss"] for figures in together}) == len(jobs)


def test_side_by_side_refuses_what_it_cannot_stack() -> None:
    with pytest.raises(ValueError, match="Muon"):
        SideBySide([Job((*DIGITS, "strategy=dct", "model.optimizer=Muon"), 2, 2)])
    with pytest.raises(ValueError, match="overlap_steps"):
        SideBySide([Job((*TINY, "strategy=dct", "strategy.overlap_steps=1"), 2, 2)])


def test_dense_training_is_that_of_all_ranks_together(ranks: Any, tmp_path: Path) -> None:
    overrides = (*TINY, "strategy=ddp", "seed=3")
    real = ranks(2).run(train_for_real, overrides, STEPS, str(tmp_path))
    dense = Replicas(Prepared(Job(overrides, ranks=2, steps=STEPS)))
    losses = [float(dense.step()) for _ in range(STEPS)]
    mean = [sum(both) / 2 for both in zip(real[0][0], real[1][0], strict=True)]
    assert losses == pytest.approx(mean, rel=1e-3)


@pytest.mark.parametrize("steps", [1, 19, 100, 1000, 60_000])
def test_the_last_twentieth_is_validated_often(steps: int) -> None:
    checked = validated_after(steps)
    last = {step for step in checked if is_last(step, steps)}
    assert max(checked) == steps
    assert min(last) >= 0.95 * steps
    assert len(last) == min(CHECKS, steps // 20 + 1)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Jobs whose figures are made up: 1% more with `dct`, twice the noise of a seed, 0.005 the best
    rate.
    """
    jobs: list[Job] = []

    def made_up(job: Job, report: Any) -> dict[str, Any]:
        jobs.append(job)
        own = dict(word.split("=") for word in job.overrides)
        if own.get("strategy.density") == "0.01":
            raise ValueError("too few")
        rate = float(own["model.learning_rate"])
        is_dct = own["strategy"] == "dct"
        loss = (1 + abs(rate - 0.005)) * (
            1.01 + 0.002 * (int(own["seed"]) + job.start) if is_dct else 1.0
        )
        report(job.steps, loss)
        settings = {"local_steps": 1, "density": 0.1, "exchange": "auto"} if is_dct else None
        figures = {"loss": loss, "noise": 0.001, "milliseconds_per_step": 1.0, "settings": settings}
        return {**figures, "ratio": 50.0 if is_dct else 1.0}

    monkeypatch.setattr(replicas, "train", made_up)
    return jobs


def test_the_command_compares_with_the_best_dense_rate(
    trained: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "experiment=lm",
        "--rates",
        "0.003",
        "0.005",
        "--seeds",
        "0",
        "1",
        "--steps",
        "100",
        "--ranks",
        "2",
        "4",
    ]
    words += ["--output", str(tmp_path), "--strategy", "ddp", "--strategy", "dct"]
    assert replicas.main(words) == 0
    assert len(trained) == 2 * (2 * 2 + 2)
    assert all(
        "model.learning_rate=0.005" in job.overrides
        for job in trained
        if "strategy=dct" in job.overrides
    )
    capsys.readouterr()
    table = (tmp_path / "table.txt").read_text()
    rows = json.loads((tmp_path / "replicas.json").read_text())["rows"]
    assert [(row["ranks"], row["strategy"], row["rate"]) for row in rows[:3]] == [
        (2, "ddp", 0.003), (2, "ddp", 0.005), (2, "dct", 0.005),
    ]  # fmt: skip
    assert "+1.10% ± 0.14%" in table  # 1.0% with seed 0 and 1.2% with seed 1
    assert "+0.20% ± 0.00%" in table  # of the first dense rate against the second
    assert "deviate by 0.10%" in table
    assert replicas.main(words) == 0  # nothing is done again
    assert len(trained) == 12
    assert replicas.main([*words, "--strategy", "dct strategy.density=0.01"]) == 1
    assert "ValueError: too few" in capsys.readouterr().err


def test_starts_are_runs_like_seeds(
    trained: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "experiment=lm",
        "--rates",
        "0.005",
        "--seeds",
        "0",
        "--starts",
        "2",
        "--output",
        str(tmp_path),
    ]
    assert replicas.main([*words, "--strategy", "ddp", "--strategy", "dct"]) == 0
    assert [job.start for job in trained] == [0, 1, 0, 1]
    table = (tmp_path / "table.txt").read_text()
    assert "+1.10% ± 0.14%" in table
    assert "Seeds [0], 2 starts each" in table


def test_starts_differ_by_a_ten_thousandth() -> None:
    first, second, again = (
        Prepared(Job((*TINY, *DCT), 2, STEPS, start=start)).module for start in (0, 1, 1)
    )
    by_start = zip(first.parameters(), second.parameters(), again.parameters(), strict=True)
    for one, other, same in by_start:
        assert torch.equal(other, same)
        assert torch.equal(one, other) == (not one.any())
        torch.testing.assert_close(one, other, rtol=1e-3, atol=0.0)


def test_a_training_that_diverges_is_told_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        *DIGITS,
        "--rates",
        "0.1",
        "1e30",
        "--steps",
        "20",
        "--output",
        str(tmp_path),
        "--strategy",
        "ddp",
    ]
    assert replicas.main(words) == 1
    monkeypatch.setattr(replicas, "train", lambda *_: pytest.fail("trained again"))
    assert replicas.main(words) == 1
    assert capsys.readouterr().err.count("seed=0 learning_rate=1e+30: the loss is not finite") == 2
    table = (tmp_path / "table.txt").read_text()
    assert "the loss is not finite" in table
    assert [
        row["rate"] for row in json.loads((tmp_path / "replicas.json").read_text())["rows"]
    ] == [0.1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--strategy", "dct"], "must be ddp"),
        (
            [
                "--strategy",
                "ddp",
                "--strategy",
                "dct",
                "--strategy",
                "dct: dct strategy.density=0.1",
            ],
            "label of its own",
        ),
        (["strategy=ddp", "--strategy", "ddp", "--strategy", "dct"], "--strategy sets"),
        (["seed=1", "--strategy", "ddp"], "--seeds sets"),
        (["trainer.max_steps=9", "--strategy", "ddp"], "--steps sets"),
        (["--ranks", "1", "--strategy", "ddp"], "--ranks takes numbers from 2 on"),
        (["--starts", "0", "--strategy", "ddp"], "--starts from 1 on"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        replicas.main(["experiment=lm", *words, "--output", str(tmp_path)])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((*TINY, "strategy=top_k"), "strategy=dct"),
        (
            (*TINY, "strategy=hivemind"),
            r"the methods of rivals\.sparse_loco and rivals\.with_torchft",
        ),
        ((*TINY, "strategy=sparse_loco"), r"sync_every=30: a run of 2 steps never syncs"),
        (
            (*TINY, "strategy=ddp", "trainer.gradient_clip_val=0.5"),
            r"trainer\.gradient_clip_val=0\.5: use null",
        ),
        ((*TINY, "strategy=ddp", "trainer.accumulate_grad_batches=2"), "use 1"),
        (
            (
                "experiment=zoo/residual_cosine",
                "data.train_images=8",
                "data.val_images=8",
                "strategy=ddp",
            ),
            "BatchNorm",
        ),
    ],
)
def test_what_replicas_would_do_differently_is_refused(
    overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Prepared(Job(overrides, ranks=2, steps=2))


def test_nothing_is_dropped_in_validation() -> None:
    job = Job((*TINY, "strategy=ddp", "model.dropout=0.5"), ranks=2, steps=1, val_rows=8)
    prepared = Prepared(job)
    losses = {
        mean_loss(prepared.module, {}, rows_of_validation(prepared.data, job)) for _ in range(2)
    }
    assert len(losses) == 1
    assert prepared.module.training
