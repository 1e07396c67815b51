"""The contract over whole exchanges: emulated ranks end with the same bits, whichever way they pack
and add.
"""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from differences import assert_same
from emulated_ranks import EmulatedRanks, harm, in_threads
from interpreted import CPU, WAYS, bits, device_of, on, way_of
from lightning_dct import DCTConfig
from lightning_dct.compress.codec import name_broken_sender
from lightning_dct.sync import optimizer_clock
from lightning_dct.sync.buffers import Buffers
from lightning_dct.sync.updates import UpdateSynchronizer
from lightning_dct.wire.positions import PayloadError
from one_card import DEVICE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "exchange", "ranks_per_node"), [(2, "two_phase", 1), (4, "hierarchical", 2)]
)
def test_exchanges_of_gradients(world_size: int, exchange: str, ranks_per_node: int) -> None:
    """Over other buckets, a tensor that is not used, a step that is lost and a refresh."""
    sizes = {"a": 700, "b": 50, "c": 350, "d": 70}
    settings = {"density": 0.1, "min_tensor_size": 60, "value_format": "2bit"}
    runs = {
        way: EmulatedRanks(
            sizes,
            world_size,
            exchange,
            ranks_per_node,
            loss_scale=lambda: 4.0,
            defer_unused=True,
            **settings,
        )
        for way in WAYS[1:]
    }
    noise = torch.Generator().manual_seed(1)
    for step, buckets in enumerate(
        [[["d", "c", "b", "a"]], [["c"], ["b", "a"], ["d"]], [["d", "c", "b", "a"]]]
    ):
        gradients = [
            {name: torch.randn(size, generator=noise).pow(3) for name, size in sizes.items()}
            for _ in range(world_size)
        ]
        gradients[0]["c"][:] = 0.0
        if step == 1:
            gradients[1]["a"][5] = math.inf
        means = []
        for way, ranks in runs.items():
            if step == 2:
                ranks.request_refresh()
            with way_of(way):
                means.append(on(CPU, ranks.step(on(device_of(way), gradients), buckets)))
        for expected_mean, mean in zip(*means, strict=True):
            assert all(
                torch.equal(expected_mean[name].nan_to_num(7.0), mean[name].nan_to_num(7.0))
                for name in sizes
            )
        for expected, found in zip(*(ranks.synchronizers for ranks in runs.values()), strict=True):
            thresholds = expected.thresholds.state_dict()["values"]
            assert found.thresholds.state_dict()["values"] == pytest.approx(thresholds, rel=1e-12)
    for expected_state, state in zip(
        *(on(CPU, ranks.state_dicts()) for ranks in runs.values()), strict=True
    ):
        times = {"seconds": 0, "seconds_waiting": 0}
        assert {**state["traffic"], **times} == {**expected_state["traffic"], **times}
        assert state["thresholds"]["targets"] == expected_state["thresholds"]["targets"]
        assert state["residuals"].keys() == expected_state["residuals"].keys()
        assert state["owned"].keys() == expected_state["owned"].keys()
        for name, residual in expected_state["residuals"].items():
            assert torch.equal(bits(residual), bits(state["residuals"][name]))
        for name, pieces in expected_state["owned"].items():
            assert all(
                torch.equal(bits(piece), bits(state["owned"][name][start]))
                for start, piece in pieces.items()
            )


class UpdatingRanks:
    """The ranks of an exchange, each with its own weights; all changes are random."""

    def __init__(
        self,
        world_size: int,
        exchange: str,
        ranks_per_node: int,
        sizes: dict[str, int],
        device: torch.device = CPU,
        **given: Any,
    ) -> None:
        settings = {"local_steps": 1, "min_tensor_size": 60, **given}
        emulated = EmulatedRanks(sizes, world_size, exchange, ranks_per_node)
        self.noise = torch.Generator().manual_seed(1)
        self.synchronizers = []
        self.optimizers = []
        for rank in range(world_size):
            parameters = {
                name: nn.Parameter(torch.linspace(-1, 1, size).to(device))
                for name, size in sizes.items()
            }
            optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
            config = DCTConfig(**settings)
            self.optimizers.append(optimizer)
            self.synchronizers.append(
                UpdateSynchronizer(
                    config,
                    {parameter: name for name, parameter in parameters.items()},
                    emulated._exchange(exchange, rank, ranks_per_node, config),
                    Buffers(),
                    lambda own=[optimizer]: own,
                    lambda own=parameters: own.values(),
                )
            )

    def step(self, broken: float | None = None) -> None:
        changes = [
            [
                torch.randn(p.shape, generator=self.noise).pow(3)
                for p in optimizer.param_groups[0]["params"]
            ]
            for optimizer in self.optimizers
        ]
        if broken is not None:
            changes[1][0][[3, 5, 9]] = broken
        in_threads(self._step, list(zip(self.optimizers, self.synchronizers, changes, strict=True)))

    @staticmethod
    def _step(given: tuple[torch.optim.Optimizer, UpdateSynchronizer, list[Tensor]]) -> None:
        optimizer, synchronizer, changes = given
        synchronizer.before_step(optimizer)
        for parameter, change in zip(optimizer.param_groups[0]["params"], changes, strict=True):
            parameter.data.add_(change.to(parameter.device))
        synchronizer.after_step(optimizer)

    def state_dicts(self) -> list[dict[str, Any]]:
        states = []
        for own in self.synchronizers:
            state = own.state_dict()
            weights = own.weights
            shared = {name: weights.shared(name) for name in weights.parameters}
            states.append(
                on(CPU, {part: state[part] for part in ("weights", "owned")} | {"shared": shared})
            )
        return states


SIZES = {"a": 1400, "b": 50, "c": 700, "d": 120, "e": 16}
# Ranks, exchange, ranks of a node, value format, density. Elias-Fano below a density of a quarter.
EXCHANGES = [
    (2, "all_gather", 1, "1bit", 0.3),
    pytest.param(3, "all_gather", 1, "bf16", 0.05, marks=pytest.mark.slow),
    pytest.param(3, "two_phase", 1, "1bit", 0.05, marks=pytest.mark.slow),
    pytest.param(4, "hierarchical", 2, "1bit", 0.3, marks=pytest.mark.slow),
]
EVERY_EXCHANGE = pytest.mark.parametrize(
    ("world_size", "exchange", "ranks_per_node", "value_format", "density"), EXCHANGES
)


@EVERY_EXCHANGE
def test_exchanges_of_updates(
    world_size: int,
    exchange: str,
    ranks_per_node: int,
    value_format: str,
    density: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In warm-up and after it, over several buckets."""
    monkeypatch.setattr(optimizer_clock, "LARGEST_BUCKET", 1500)
    monkeypatch.setattr(optimizer_clock, "LARGEST_ON_GPU", 1500)
    settings = {"value_format": value_format, "density": density, "warmup_steps": 1}
    states = []
    for way in WAYS[1:]:
        with way_of(way):
            ranks = UpdatingRanks(
                world_size, exchange, ranks_per_node, SIZES, device_of(way), **settings
            )
            for _ in range(2):
                ranks.step()
            states.append(ranks.state_dicts())
    assert_same(*states)


def test_a_rank_that_sends_nan_is_named_once_its_numbers_are_known() -> None:
    name_broken_sender.cache_clear()
    with way_of("triton"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ranks = UpdatingRanks(
            2, "all_gather", 1, {"a": 1400, "b": 50}, device_of("triton"), warmup_steps=0
        )
        ranks.step()
        assert not said
        ranks.step(math.nan)
        ranks.step()
    assert any(
        "Updates from rank 1 of the process group are infinite or NaN" in str(one.message)
        for one in said
    )


@pytest.mark.parametrize("saved", [True, False])
def test_harm_is_reported_once_it_is_known_and_before_anything_is_saved(
    saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    harm(
        monkeypatch,
        ranks := EmulatedRanks({"a": 1400}, 2, "two_phase", density=0.2),
        1,
        middle=True,
    )
    local = [{"a": torch.randn(1400, device=DEVICE)} for _ in range(2)]
    with way_of("triton"):
        ranks.step(local)
        with pytest.raises(
            PayloadError, match=r"^Sums from rank 1 of the process group: the payload is corrupt"
        ):
            ranks.state_dicts() if saved else ranks.step(local)
