"""Several ranks in one process: threads that meet at every collective, without a network."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from lightning_dct import DCTConfig
from lightning_dct.exchange import collectives
from lightning_dct.exchange.base import Exchange
from lightning_dct.exchange.collectives import Link
from lightning_dct.exchange.compressed import AllGather, Hierarchical, TwoPhase
from lightning_dct.exchange.factory import share_model
from lightning_dct.sync.gradients import GradientSynchronizer
from lightning_dct.traffic import Traffic

TIMEOUT = 240.0
Gradients = Mapping[str, Tensor]


def heavy_tailed(
    step: int, world_size: int = 2, dtype: torch.dtype = torch.float32, *, sizes: Mapping[str, int]
) -> list[dict[str, Tensor]]:
    """Gradients by rank, others on every rank and step."""
    noise = torch.Generator().manual_seed(step)
    return [
        {name: torch.randn(size, generator=noise).pow(3).to(dtype) for name, size in sizes.items()}
        for _ in range(world_size)
    ]


class Meeting:
    """One collective: what each rank brought."""

    def __init__(self, world_size: int) -> None:
        self.brought: dict[int, Tensor] = {}
        self._sizes: dict[int, list[int]] = {}
        self._world_size = world_size
        self._changed = Condition()

    def bring(self, rank: int, tensor: Tensor, sizes: list[int] | None = None) -> None:
        with self._changed:
            self.brought[rank] = tensor.clone()
            self._sizes[rank] = sizes or []
            if tensor.is_cuda:  # other ranks read it on streams of their own
                torch.cuda.synchronize()
            self._changed.notify_all()

    def everyone(self) -> list[Tensor]:
        with self._changed:
            complete = self._changed.wait_for(
                lambda: len(self.brought) == self._world_size, TIMEOUT
            )
        assert complete, (
            f"only ranks {sorted(self.brought)} of {self._world_size} came to a collective"
        )
        return [self.brought[rank] for rank in range(self._world_size)]

    def all_sizes(self) -> list[list[int]]:
        return [self._sizes[rank] for rank in range(self._world_size)]


class EmulatedGroup:
    """One rank's process group: some of the world's ranks."""

    def __init__(self, rank: int, members: Sequence[int], world: "EmulatedRanks") -> None:
        self.members = tuple(members)
        self._rank = rank
        self._world = world
        self._calls = 0

    def size(self) -> int:
        return len(self.members)

    def rank(self) -> int:
        return self.members.index(self._rank)

    def next_meeting(self) -> Meeting:
        self._calls += 1
        return self._world.meeting(self.members, self._calls - 1)


class EmulatedDist:
    """The collectives that ``exchange`` calls, with the meaning torch.distributed gives them."""

    @staticmethod
    def all_gather_single(
        output: Tensor, mine: Tensor, group: EmulatedGroup, async_op: bool
    ) -> Any:
        assert async_op
        assert mine.dtype == torch.uint8
        meeting = group.next_meeting()
        meeting.bring(group.rank(), mine)
        return SimpleNamespace(wait=lambda: output.copy_(torch.cat(meeting.everyone())))

    @staticmethod
    def all_to_all_single(
        output: Tensor,
        mine: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        group: EmulatedGroup,
        async_op: bool,
    ) -> Any:
        assert async_op
        assert mine.dtype == torch.uint8
        meeting = group.next_meeting()
        rank = group.rank()
        meeting.bring(rank, mine, input_sizes)

        def finish() -> None:
            parts = [
                theirs.split(sizes)[rank]
                for theirs, sizes in zip(meeting.everyone(), meeting.all_sizes(), strict=True)
            ]
            assert [part.numel() for part in parts] == output_sizes
            output.copy_(torch.cat(parts))

        return SimpleNamespace(wait=finish)

    @staticmethod
    def get_backend(group: EmulatedGroup) -> str:
        return "emulated"

    @staticmethod
    def all_reduce(buffer: Tensor, group: EmulatedGroup, async_op: bool) -> Any:
        assert async_op
        meeting = group.next_meeting()
        meeting.bring(group.rank(), buffer)
        return SimpleNamespace(
            wait=lambda: buffer.copy_(sum(meeting.everyone()[1:], start=meeting.everyone()[0]))
        )


def fake_bucket(index: int, buffer: Tensor, parameters: list[nn.Parameter], is_last: bool) -> Any:
    """What GradientSynchronizer asks of a GradBucket."""
    answers = {"index": index, "buffer": buffer, "parameters": parameters, "is_last": is_last}
    return SimpleNamespace(
        **{name: lambda answer=answer: answer for name, answer in answers.items()}
    )


def in_threads(function: Callable[[Any], Any], each: Sequence[Any]) -> list[Any]:
    """What a function that communicates gives for each rank's argument."""
    with (
        mock.patch.object(collectives, "dist", EmulatedDist),
        ThreadPoolExecutor(len(each)) as threads,
    ):
        return list(threads.map(function, each))


class EmulatedRanks:
    """``world_size`` synchronisers of the same parameters, with so many entries each by name;
    settings of DCTConfig.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        world_size: int = 2,
        exchange: str = "all_gather",
        ranks_per_node: int = 1,
        loss_scale: Callable[[], float] | None = None,
        defer_unused: bool = False,
        **settings: Any,
    ) -> None:
        self.sizes = dict(sizes)
        self.world_size = world_size
        self._defer_unused = defer_unused
        config = DCTConfig(compress="gradients", **{"min_tensor_size": 0, **settings})
        self.meetings: list[Meeting] = []
        self._meetings_of: dict[tuple[int, ...], list[Meeting]] = {}
        self._meetings_lock = Condition()
        self._parameters = [
            {name: nn.Parameter(torch.zeros(n)) for name, n in sizes.items()}
            for _ in range(world_size)
        ]
        self.synchronizers = [
            GradientSynchronizer(
                config,
                {parameter: name for name, parameter in parameters.items()},
                self._exchange(exchange, rank, ranks_per_node, config),
                defer_unused=defer_unused,
                loss_scale=loss_scale,
            )
            for rank, parameters in enumerate(self._parameters)
        ]

    def meeting(self, members: tuple[int, ...], number: int) -> Meeting:
        """A group's collectives in their order; ``meetings`` holds those of all groups."""
        with self._meetings_lock:
            of_group = self._meetings_of.setdefault(members, [])
            while len(of_group) <= number:
                of_group.append(Meeting(len(members)))
                self.meetings.append(of_group[-1])
            return of_group[number]

    def step(
        self, gradients: Sequence[Gradients], buckets: Sequence[Sequence[str]] | None = None
    ) -> list[dict[str, Tensor]]:
        """One synchronisation; each rank's averaged gradients."""
        buckets = buckets or [list(self.sizes)]
        self.meetings_before = len(self.meetings)
        return in_threads(
            lambda rank: self._run(rank, gradients[rank], buckets), range(self.world_size)
        )

    def payloads(self, bucket: int = 0) -> list[Tensor]:
        """What each rank sent for a bucket in the last step, without the tag of that step."""
        sent = [
            payload.clone() for payload in self.meetings[self.meetings_before + bucket].everyone()
        ]
        for payload in sent:
            payload[8:10] ^= torch.tensor(
                [self.synchronizers[0]._context.tag], dtype=torch.int16
            ).view(torch.uint8)
        return sent

    def state_dicts(self) -> list[dict[str, Any]]:
        return [synchronizer.state_dict() for synchronizer in self.synchronizers]

    def residuals(self) -> list[dict[str, Tensor]]:
        """Each rank's residuals by name, zero where there is none yet; copies."""
        zeros = {name: torch.zeros(size) for name, size in self.sizes.items()}
        return [
            {**zeros, **synchronizer.residuals.state_dict()} for synchronizer in self.synchronizers
        ]

    def held_back(self) -> dict[str, Tensor]:
        """What all ranks hold back together, of their own gradients and of sums they own, by name,
        in fp64.
        """
        held = {name: torch.zeros(size, dtype=torch.float64) for name, size in self.sizes.items()}
        for state in self.state_dicts():
            for name, residual in state["residuals"].items():
                held[name] += residual
            for name, pieces in state["owned"].items():
                for start, piece in pieces.items():
                    held[name][start : start + piece.numel()] += piece
        return held

    def request_refresh(self) -> None:
        for synchronizer in self.synchronizers:
            synchronizer.request_refresh()

    def _exchange(self, name: str, rank: int, ranks_per_node: int, config: DCTConfig) -> Exchange:
        def link(members: Sequence[int], per_node: int) -> Link:
            return Link(EmulatedGroup(rank, members, self), traffic, per_node)  # type: ignore[arg-type]

        traffic = Traffic()
        parameters = self._parameters[rank]
        defer_unused = self._defer_unused
        everyone = link(range(self.world_size), ranks_per_node)
        if name == "two_phase":
            return TwoPhase(
                everyone, share_model(config, parameters, 2.0, self.world_size), defer_unused
            )
        if name == "hierarchical":
            first = rank - rank % ranks_per_node
            inside = link(range(first, first + ranks_per_node), ranks_per_node)
            between = link(range(rank % ranks_per_node, self.world_size, ranks_per_node), 1)
            return Hierarchical(
                everyone,
                inside,
                between,
                share_model(config, parameters, 2.0, ranks_per_node),
                defer_unused,
            )
        return AllGather(everyone)

    def _run(
        self, rank: int, gradients: Gradients, buckets: Sequence[Sequence[str]]
    ) -> dict[str, Tensor]:
        futures = []
        for index, names in enumerate(buckets):
            parts = [gradients[name] for name in names]
            buffer = parts[0].clone() if parts[0].is_sparse else torch.cat(parts)
            bucket = fake_bucket(
                index,
                buffer,
                [self._parameters[rank][name] for name in names],
                is_last=index == len(buckets) - 1,
            )
            futures.append(self.synchronizers[rank].hook(None, bucket))  # type: ignore[arg-type]
        means: dict[str, Tensor] = {}
        for names, future in zip(buckets, futures, strict=True):
            mean = future.wait()
            parts = (
                [mean] if mean.is_sparse else list(mean.split([self.sizes[name] for name in names]))
            )
            means.update(zip(names, parts, strict=True))
        return means


def harm(monkeypatch: Any, ranks: EmulatedRanks, number: int, middle: bool = False) -> None:
    """Everybody reads zeros at the beginning, and in the middle, of what rank 1 brings to one of
    the meetings.
    """
    intact = Meeting.everyone

    def harmed(self: Meeting) -> list[Tensor]:
        payloads = [payload.clone() for payload in intact(self)]
        if self in ranks.meetings[number : number + 1]:
            payloads[1][[0, payloads[1].numel() // 2] if middle else 0] = 0
        return payloads

    monkeypatch.setattr(Meeting, "everyone", harmed)
