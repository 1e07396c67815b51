"""What cannot work is refused on every rank, with the setting and the remedy, before anything
hangs.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torchmetrics import MeanMetric

from distributed.harness import RankFailure
from distributed.scripts import Script
from distributed.training import Noise, message_of, rank, trainer_for
from lightning_dct import DCTPipelineStrategy, SplitPoint
from pipeline.split_models import SplitModule, batches, strategy_for, train_alone


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"stages": 1}, "`stages` must be at least 2"),
        ({"stages": 2.0}, "`stages` must be a whole number"),
        ({"micro_batches": 0}, "`micro_batches` must be at least 1"),
        (
            {"schedule": "zero_bubble"},
            "`schedule` must be one of 'gpipe', '1f1b', 'interleaved_1f1b'",
        ),
        ({"stages": 4, "micro_batches": 3}, "Use 4 or more, or schedule='gpipe'"),
        (
            {"schedule": "interleaved_1f1b", "micro_batches": 5},
            "needs a multiple of `stages=2`. Use 4.",
        ),
        ({"process_group": "mine"}, "makes its own process groups"),
        ({"static_graph": True}, "cannot take `static_graph`"),
        ({"density": 2.0}, "`density` is the share"),
        ({"ddp_comm_hook": print}, "ddp_comm_hook"),
    ],
)
def test_settings(settings: dict[str, Any], said: str) -> None:
    assert said in message_of(DCTPipelineStrategy, **settings)


class Broken(SplitModule):
    """One thing wrong with it."""

    def __init__(self, fault: str) -> None:
        super().__init__(4 if fault == "pieces" else 2)
        self.fault = fault
        if fault == "manual":
            self.automatic_optimization = False
        elif fault == "outside":
            self.extra = nn.Linear(2, 2)
        elif fault == "none":
            self.network = nn.Sequential(nn.Linear(40, 8))
        elif fault == "two":
            self.other = nn.Sequential(nn.Linear(2, 2), SplitPoint(), nn.Linear(2, 2))
        elif fault == "empty":
            self.network.append(SplitPoint())
        elif fault == "tied":
            self.network = nn.Sequential(
                shared := nn.Linear(40, 40), SplitPoint(), nn.Linear(40, 40), nn.Linear(40, 8)
            )
            self.network[2].weight = shared.weight
        elif fault == "untrained":
            self.network[3].requires_grad_(False)
        elif fault == "pair":
            self.network[1] = Pair()
        elif fault == "metric":
            self.metric = MeanMetric(dist_sync_on_step=True)
        elif fault == "values":
            self.network[1] = ReadsValues()
        elif fault == "own forward":
            self.network = OwnForward(nn.Linear(40, 40), SplitPoint(), nn.Linear(40, 8))
        elif fault == "buffers":
            norm = nn.BatchNorm1d(40, affine=False)
            self.network = nn.Sequential(
                nn.Linear(40, 40), norm, SplitPoint(), norm, nn.Linear(40, 8)
            )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.fault == "frozen":
            self.network[0].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.fault == "gathers":
            self.all_gather(batch[0])
        if self.fault == "skips":
            return batch[0].sum()
        loss = super().training_step(batch, batch_idx)
        return None if self.fault == "returns nothing" else loss


class Pair(nn.Module):
    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, inputs


class OwnForward(nn.Sequential):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(2.0 * inputs)


class ReadsValues(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * float(inputs.sum())


FAULTS = {
    "manual": "works with automatic optimisation only",
    "outside": "'extra.weight' lies outside the Sequential",
    "none": "but none has any. Build the network",
    "two": "'network', 'other' have",
    "empty": "a `SplitPoint` must stand between two modules",
    "tied": "is also used on stage 0: stages on different ranks cannot share it",
    "untrained": "Stage 1 of the pipeline has no trainable parameter",
    "frozen": "Stage 0 of the pipeline has no trainable parameter",
    "pieces": "cut it into 4 pieces, and `stages=2`",
    "pair": "Piece 0 of the pipeline returns a tuple",
    "values": "Piece 0 of the pipeline cannot be run on fake tensors",
    "own forward": "is a OwnForward, whose own `forward` no stage would run",
    "buffers": "The buffer '",
    "metric": "The metric 'metric' has `dist_sync_on_step=True`",
    "gathers": "`self.all_gather` in a step would wait forever",
    "skips": "`training_step` never calls the Sequential",
}


def fit_broken(fault: str) -> str:
    return message_of(trainer_for(strategy_for(2)).fit, Broken(fault), batches(1, 2))


def fit_wrongly(fault: str) -> str:
    """One thing wrong around the model."""
    strategy = strategy_for(2)
    settings = {}
    data = batches(1, 2)
    if fault == "stages":
        strategy = strategy_for(3)
    elif fault == "interleaved":
        strategy = strategy_for(2, "interleaved_1f1b")
    elif fault == "batch":
        data = batches(1, 2, size=6)
    elif fault == "precision":
        settings["plugins"] = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    elif fault == "anomaly":
        settings["detect_anomaly"] = True
    elif fault == "data":
        data = torch.utils.data.DataLoader(Noise(1, 40, 8, 8, rank()), batch_size=None)
    elif fault == "averaging":
        settings["callbacks"] = [StochasticWeightAveraging(0.1)]
    elif fault == "finetuning":
        settings["callbacks"] = [BackboneFinetuning()]
    elif fault == "disagreement":
        strategy = strategy_for(2, "gpipe" if rank() else "1f1b")
    return message_of(trainer_for(strategy, **settings).fit, SplitModule(), data)


SURROUNDINGS = {
    "stages": "`stages=3` does not divide the 2 processes",
    "interleaved": "takes a multiple of `stages` above it (4 pieces",
    "batch": "`micro_batches=4` does not divide the training batch, which has 6 rows",
    "precision": "precision='16-mixed' does not work",
    "anomaly": "detect_anomaly=True",
    "data": (
        "have read different batches for `training_step`, and all of them must read the same. Begin"
        " the script with `seed_everything(0, workers=True)`"
    ),
    "averaging": "`StochasticWeightAveraging` does not work with",
    "finetuning": "`BaseFinetuning` does not work with",
    "disagreement": "The ranks disagree on `schedule` (rank 0: '1f1b', rank 1: 'gpipe')",
}


def all_messages() -> dict[str, str]:
    told = {fault: fit_broken(fault) for fault in FAULTS}
    return told | {fault: fit_wrongly(fault) for fault in SURROUNDINGS}


def test_torch_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.9.1+cu130"))
    with pytest.raises(
        RuntimeError, match=r"needs torch 2\.13 or later, and this is torch 2\.9\.1"
    ):
        DCTPipelineStrategy()


def test_faults_are_named_on_every_rank(ranks: Any) -> None:
    """Oracle: the messages above, from both ranks, one run after the other in the same
    processes.
    """
    for told in ranks(2).run(all_messages):
        for fault, said in (FAULTS | SURROUNDINGS).items():
            assert said in told[fault], fault


def fit_without_loss() -> None:
    trainer_for(strategy_for(2)).fit(Broken("returns nothing"), batches(1, 2))


def test_a_step_that_returns_no_loss_is_named(ranks: Any) -> None:
    """Oracle: the last stage's rank says so, in its own words and not in those of the schedule."""
    with pytest.raises(
        RankFailure, match="must return a loss that depends on the network's output"
    ):
        ranks(2).run(fit_without_loss)


SCRIPT = """
    import sys
    from lightning.pytorch import Trainer
    import lightning_dct
    from pipeline.split_models import SplitModule
    from distributed.training import Noise
    from torch.utils.data import DataLoader

    class Module(SplitModule):
        def on_train_batch_start(self, batch, batch_idx):
            if "fails" in sys.argv and self.global_rank == 1 and batch_idx == 1:
                raise RuntimeError("rank 1 has had enough")

    if __name__ == "__main__":
        module = Module()
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy=sys.argv[1], max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer.fit(module, DataLoader(Noise(3, 40, 8, 8), batch_size=None))
        print("sum of all weights", float(sum(parameter.double().sum() for parameter in module.parameters())))
    """


def run_script(folder: Path, *arguments: str) -> tuple[int, str]:
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return Script(folder, SCRIPT, *arguments, PYTHONPATH=path).end()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_python")
def test_a_failing_rank_ends_the_job(tmp_path: Path) -> None:
    """Oracle: the launcher of `strategy="dct_pipeline"` ends with a failing exit status and the
    error.
    """
    status, output = run_script(tmp_path, "dct_pipeline", "fails")
    assert status != 0
    assert "rank 1 has had enough" in output


@pytest.mark.slow
@pytest.mark.usefixtures("quick_python")
def test_spawned_processes_give_the_whole_model_back(tmp_path: Path) -> None:
    """Oracle: the process that spawns has the weights that two stages have trained: those of one
    process.
    """
    status, output = run_script(tmp_path, "dct_pipeline_spawn")
    assert status == 0, output
    _, weights = train_alone(2, count=3)
    total = float(sum(weight.double().sum() for weight in weights.values()))
    assert float(output.rsplit("sum of all weights")[-1].split()[0]) == pytest.approx(
        total, abs=1e-4
    )
