"""Wrong settings and ranks that disagree end in an error that says what to do; nothing hangs."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

import lightning_dct.fabric
from distributed.training import Module, fit, launched, message_of, perceptron, rank, trainer_for
from embedding.hybrid import Hybrid
from embedding.hybrid import batches as hybrid_batches
from lightning_dct import (
    DCTPipelineStrategy,
    DCTStrategy,
    ShardedEmbeddingBags,
    SplitPoint,
    ThresholdRefresh,
)
from lightning_dct.failures.lifeline import lifeline_of_process
from one_card import DEVICE
from pipeline.split_models import SplitModule
from pipeline.split_models import batches as stage_batches


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"density": 2}, ValueError, ["`density`", "(0, 1]", "got 2"]),
        ({"ddp_comm_hook": print}, ValueError, ["`ddp_comm_hook`", "`DDPStrategy`"]),
        ({"densty": 0.1}, TypeError, ["`DCTStrategy` has no setting `densty`", "`density`"]),
        (
            {"find_unused_parameter": True},
            TypeError,
            ["`find_unused_parameter`", "`find_unused_parameters`"],
        ),
        ({"device_ids": [0]}, TypeError, ["no setting `device_ids`"]),
    ],
)
def test_wrong_setting_is_named(
    settings: dict[str, Any], error: type[Exception], says: list[str]
) -> None:
    """Oracle: the setting's name, what it may be, and what it was."""
    with pytest.raises(error) as caught:
        DCTStrategy(**settings)
    for words in says:
        assert words in str(caught.value)


def test_other_strategies_name_an_unknown_setting_too() -> None:
    with pytest.raises(
        TypeError, match=r"`DCTStrategy` has no setting `densty`. Did you mean `density`"
    ):
        lightning_dct.fabric.DCTStrategy(densty=0.1)
    with pytest.raises(
        TypeError, match=r"`DCTPipelineStrategy` has no setting `stage`. Did you mean `stages`"
    ):
        DCTPipelineStrategy(stage=2)
    with pytest.raises(
        TypeError, match=r"has no setting `devices`. Give `devices` to the `Trainer`."
    ):
        DCTStrategy(devices=2)  # type: ignore[call-arg]


def test_what_ddp_takes_is_taken() -> None:
    """Oracle: the constructors themselves."""
    given = {
        "bucket_cap_mb": 1,
        "broadcast_buffers": False,
        "timeout": timedelta(1),
        "start_method": "spawn",
    }
    for kind in (DCTStrategy, lightning_dct.fabric.DCTStrategy, DCTPipelineStrategy):
        kind(**given)


def disagree_on_density() -> None:
    fit(DCTStrategy(density=0.01 * (1 + rank())), Module(), 3)


class Groups(Module):
    """The first group of its optimizer has another parameter on each rank."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        first, *rest = self.parameters()
        chosen = [first, *rest] if rank() else [rest[0], first, *rest[1:]]
        return torch.optim.SGD(
            [{"params": chosen[:1], "lr": 0.1}, {"params": chosen[1:], "lr": 0.2}]
        )


class Scheduled(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10 + rank())
        ]


def optimized(compress: Any, kind: type[torch.optim.Optimizer], **settings: Any) -> Any:
    return fit(DCTStrategy(compress=compress), Module(None, kind, lr=0.01, **settings), 3)


def in_fabric() -> Any:
    module = perceptron()
    optimizer = torch.optim.Adam(module.parameters(), betas=(0.9 - 0.1 * rank(), 0.99))
    return launched(lightning_dct.fabric.DCTStrategy()).setup(module, optimizer)


def tables(more: Any = None, **settings: Any) -> Any:
    module = Hybrid(settings)
    module.more = more
    return trainer_for(DCTStrategy(density=0.5)).fit(module, hybrid_batches(2))


def stages() -> Any:
    module = SplitModule(2)
    module.network[0] = nn.Linear(40, 24, dtype=torch.float64 if rank() else torch.float32)
    return trainer_for(DCTPipelineStrategy(stages=2)).fit(module, stage_batches(2, 2))


def split() -> Module:
    module = Module()
    module.model.split = SplitPoint(density=0.1, forward_format="int8" if rank() else "int4")
    return module


# What ranks do, and what all of them must be told.
DISAGREEMENTS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "density": (disagree_on_density, ["`density`", "rank 0: 0.01", "rank 1: 0.02"]),
    "refresh": (
        lambda: fit(DCTStrategy(), Module(), callbacks=[ThresholdRefresh(10 * (1 + rank()))]),
        ["ThresholdRefresh", "rank 0: [10]", "rank 1: [20]"],
    ),
    "model": (
        lambda: fit(DCTStrategy(), Module(perceptron(hidden=24 + rank())), 3),
        ["`parameter ", "rank 0: ", "rank 1: "],
    ),
    "weight decay": (
        lambda: optimized("updates", torch.optim.AdamW, weight_decay=10.0 * rank()),
        ["`weight_decay of optimizer 0, group 0` (rank 0: 0.0, rank 1: 10.0)"],
    ),
    "optimizer": (
        lambda: optimized("gradients", (torch.optim.SGD, torch.optim.AdamW)[rank()]),
        ["`class of optimizer 0` (rank 0: 'SGD', rank 1: 'AdamW')"],
    ),
    "groups": (
        lambda: fit(DCTStrategy(), Groups(), 3),
        ["`checksum of the parameters' names of optimizer 0, group 0`"],
    ),
    "schedule": (
        lambda: fit(DCTStrategy(), Scheduled(), 3),
        ["`T_max of scheduler 0` (rank 0: 10, rank 1: 11)"],
    ),
    "length": (
        lambda: fit(DCTStrategy(), Module(), 3, max_steps=2 + rank()),
        ["`Trainer(max_steps)` (rank 0: 2, rank 1: 3)"],
    ),
    "accumulation": (
        lambda: fit(DCTStrategy(), Module(), 4, accumulate_grad_batches=1 + rank()),
        ["`Trainer(accumulate_grad_batches)` (rank 0: 1, rank 1: 2)"],
    ),
    "Fabric": (
        in_fabric,
        ["`betas of optimizer 0, group 0` (rank 0: [0.9, 0.99], rank 1: [0.8, 0.99])"],
    ),
    "format of rows": (
        lambda: tables(value_format="1bit" if rank() else "2bit"),
        ["`tables.value_format` (rank 0: '2bit', rank 1: '1bit')"],
    ),
    "density of rows": (
        lambda: tables(density=0.1 + 0.1 * rank()),
        ["`tables.density` (rank 0: 0.1, rank 1: 0.2)"],
    ),
    "cache": (
        lambda: tables(cache_rows=100 - rank()),
        ["`tables.cache_rows` (rank 0: 100, rank 1: 99)"],
    ),
    "tables": (lambda: tables(more=ShardedEmbeddingBags([3], 2) if rank() else None), ["`more."]),
    "split point": (
        lambda: fit(DCTStrategy(), split(), 3),
        ["`model.split.forward_format` (rank 0: 'int4', rank 1: 'int8')"],
    ),
    "stages": (stages, ["`parameter network.0.weight` (rank 0: '[24, 40] float32 trained'"]),
    "a pattern for nothing": (
        lambda: fit(DCTStrategy(density_per_parameter={"*.embedding.*": 0.1}), Module(), 3),
        ["'*.embedding.*'", "'model.first.weight'", "Fix the pattern"],
    ),
}


def disagree(name: str) -> str:
    return message_of(DISAGREEMENTS[name][0])


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_disagreement_is_an_error_on_every_rank(ranks: Any, name: str) -> None:
    """Oracle: what differs and each rank's value; the harness fails a rank that waits for the
    other.
    """
    for message in ranks(2).run(disagree, name):
        for words in DISAGREEMENTS[name][1]:
            assert words in message


def refuse_corrupt_payload() -> str:
    """Rank 1's payload says that it was made for another layout."""
    from lightning_dct.wire import payload as wire

    def damaged(*arguments: Any) -> Any:
        payload = packed(*arguments)
        if rank() == 1:
            payload[8] ^= 1
        return payload

    packed = wire.pack_payload
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "pack_payload", damaged)
        return message_of(fit, DCTStrategy(), Module(), 3)


@pytest.mark.skipif(
    DEVICE.type == "cuda", reason="payloads are made elsewhere there: `compress/test_contract.py`"
)
def test_corrupt_payload_is_an_error_on_every_rank(ranks: Any) -> None:
    """Oracle: an error that names the sender, on all ranks alike."""
    for message in ranks(2).run(refuse_corrupt_payload):
        assert "Updates from rank 1" in message
        assert "use the same model and settings on every rank" in message


def skip_a_step_of_one(exchange: str, local_steps: int, density: float | None = None) -> str:
    """Two nets of the same size, of which rank 1 once leaves out the step of the first, without
    lifelines.
    """
    lifeline_of_process()  # as an earlier loop of this process may have had
    strategy = lightning_dct.fabric.DCTStrategy(
        exchange=exchange, local_steps=local_steps, density=density, warmup_steps=0, lifelines=False
    )
    fabric = launched(strategy)
    nets = nn.ModuleList([nn.Linear(40, 40), nn.Linear(40, 40)])
    nets, *optimizers = fabric.setup(
        nets, *(torch.optim.SGD(net.parameters(), 0.1) for net in nets)
    )

    def train() -> None:
        for step in range(12):
            for number, optimizer in enumerate(optimizers):
                loss = nets.module[number](torch.ones(4, 40)).square().mean()
                fabric.backward(loss)
                if (step, number, rank()) != (4, 0, 1):
                    optimizer.step()
                optimizer.zero_grad()

    return message_of(train)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="gloo's sizes are checked, and NCCL's are not")
@pytest.mark.parametrize(
    ("exchange", "local_steps", "world_size"), [("all_gather", 1, 2), ("two_phase", 2, 3)]
)
def test_another_optimizers_updates_are_refused(
    ranks: Any, exchange: str, local_steps: int, world_size: int
) -> None:
    """Oracle: an error on every rank at the first exchange that would add one net's updates to the
    other.
    """
    for message in ranks(world_size).run(skip_a_step_of_one, exchange, local_steps):
        assert "in another step" in message
        assert "and step the same optimizers in the same order" in message


def test_whole_updates_of_another_optimizer_are_refused(ranks: Any) -> None:
    for message in ranks(3).run(skip_a_step_of_one, "all_gather", 2, 1.0):
        assert message.startswith(
            "The ranks exchange whole updates of other tensors, or of another step"
        )


def want_lifelines_by_turns() -> list[bool]:
    return [lifeline_of_process(wanted) is not None for wanted in (True, rank() == 0, False, True)]


def test_a_loop_of_which_one_rank_wants_no_lifeline_has_none(ranks: Any) -> None:
    assert ranks(2).run(want_lifelines_by_turns) == [[True, False, False, True]] * 2


def lack_a_batch() -> str:
    """Without lifelines, the next epoch begins one step earlier on rank 1."""
    strategy = DCTStrategy(lifelines=False, compress="updates")
    return message_of(lambda: fit(strategy, Module(), 6 - rank(), max_epochs=3))


def test_updates_of_another_epoch_are_refused(ranks: Any) -> None:
    for message in ranks(2).run(lack_a_batch):
        assert "as many batches an epoch" in message
