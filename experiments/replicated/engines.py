"""The package's own engine for each rank of one training, over process groups in memory."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_dct import DCTConfig
from lightning_dct.exchange.base import Exchange
from lightning_dct.exchange.compressed import AllGather, TwoPhase, link_traversals
from lightning_dct.exchange.factory import NodeLayout, choose_for_model, share_model
from lightning_dct.law import RunSettings, UserSettings
from lightning_dct.sync.buffers import Buffers
from lightning_dct.sync.entrance import StepEntrance
from lightning_dct.sync.row_gradients import weights_of_rows
from lightning_dct.sync.setup import parameter_names
from lightning_dct.sync.updates import UpdateSynchronizer
from lightning_dct.traffic import Traffic
from replicated.in_memory import MemoryLink, Ranks


class Engines:
    """What each rank of one training exchanges by: an :class:`UpdateSynchronizer`.

    No lifeline and no checksums compare the ranks, and there are no buffers.

    Args:
        settings: Of :class:`~lightning_dct.Updates`; those that are left out follow from the length
            of the run.
        modules: Those of the ranks, whose weights are all alike.
        optimizers: The optimizer of each.
        steps: Of the run.
        kind: The class of each synchronizer.

    Attributes:
        config: The settings of the whole run.
        optimizers: That of each rank.
        synchronizers: That of each rank.
        ranks: Has them take turns.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        modules: Sequence[Module],
        optimizers: Sequence[Optimizer],
        steps: int,
        kind: type[UpdateSynchronizer] = UpdateSynchronizer,
    ) -> None:
        self.ranks = Ranks(len(modules))
        self.optimizers = optimizers
        self.synchronizers: list[UpdateSynchronizer] = []
        self._entrances: list[StepEntrance] = []
        for module, group, optimizer in zip(modules, self.ranks.groups, optimizers, strict=True):
            run = RunSettings(UserSettings.of(settings), len(modules), steps)
            self.config = run.config_after(0)
            names = parameter_names(module)
            exchange = _exchange(self.config, names, MemoryLink(group, Traffic()))
            made = kind(self.config, names, exchange, Buffers(), tuple, names.keys)
            made.run_settings = run
            made.refresh_every = self.config.refresh_every
            made.rows = weights_of_rows(module)
            entrance = StepEntrance(made)
            entrance.follow(optimizer, is_agreed=True)
            self.synchronizers.append(made)
            self._entrances.append(entrance)

    def watch(self) -> None:
        """See the optimizers' steps by hooks, and exchange after them."""
        for entrance in self._entrances:
            entrance.watch()

    def step(self) -> None:
        """Make a step of each optimizer, which is watched."""
        self.ranks.run(lambda rank: self.optimizers[rank].step())

    def begin_step(self) -> None:
        """Begin a step that something else makes for all ranks."""

        def begin(rank: int) -> None:
            self.synchronizers[rank].begin_step(self.optimizers[rank])

        self.ranks.run(begin)

    def after_step(self) -> None:
        """End that step."""

        def end(rank: int) -> None:
            self.synchronizers[rank].after_step(self.optimizers[rank])

        self.ranks.run(end)

    @property
    def traffic(self) -> list[Traffic]:
        """The bytes of each rank."""
        return [one.traffic for one in self.synchronizers]

    def shared_weights(self) -> dict[str, Tensor]:
        """The weights that all ranks share, by name, once a step has begun."""
        weights = self.synchronizers[0].weights
        return {name: weights.shared(name) for name in weights.parameters}

    def figures(self) -> dict[str, Any]:
        """What was sent, and with which settings."""
        settings = {
            name: getattr(self.config, name) for name in ("local_steps", "density", "exchange")
        }
        return {
            **figures_of_traffic(self.traffic),
            "exchange": type(self.synchronizers[0].exchange).__name__,
            "settings": settings,
        }


def _exchange(config: DCTConfig, names: Mapping[Tensor, str], link: MemoryLink) -> Exchange:
    parameters = {name: parameter for parameter, name in names.items()}
    name: str = config.exchange
    if name == "auto":  # each rank on a node of its own
        layout = NodeLayout(tuple((rank, 0) for rank in range(link.size)))
        name = choose_for_model(config, parameters, layout).name
    if name not in ("all_gather", "two_phase") or config.overlap_steps:
        raise ValueError(
            "replicas exchange with all_gather or two_phase, and without overlap_steps"
        )
    if name == "two_phase":
        pieces = share_model(config, parameters, link_traversals(name, link.size), link.size)
        return TwoPhase(link, pieces, defer_unused=False)
    return AllGather(link)


def figures_of_traffic(traffic: Sequence[Traffic]) -> dict[str, float]:
    """The ratio of bytes, and those that a rank sends in a step."""
    totals = [own.totals for own in traffic]
    # All ranks send as much, but for `two_phase`, whose owners differ a little.
    sent, dense, steps = (
        sum(getattr(one, name) for one in totals) for name in ("bytes_sent", "bytes_dense", "steps")
    )
    return {"ratio": dense / sent, "bytes_sent_per_step": sent / steps}
