"""The trainings: each has a model, optimizers, this rank's loss of a step, and the loss that is
compared.
"""

import math
import sysconfig
from abc import ABC, abstractmethod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, Optimizer, SparseAdam

from zoo.digits import CLASSES, draw_digits

BYTES = 256
MODULES = 60
HELD_OUT = 0.1


class Case(ABC):
    """A training, as one rank of ``ranks`` sees it.

    Attributes:
        steps: Of the training.
        clip: The bound on the norm of the gradients; None for none.
        model: The same on all ranks.
        optimizers: Their rates end at zero.

    Args:
        seed: Of the weights and the batches.
    """

    steps = 500
    clip: float | None = None
    model: nn.Module
    optimizers: list[Optimizer]

    def __init__(self, seed: int, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        torch.manual_seed(seed)
        self.build()
        self.draw = torch.Generator().manual_seed(1_000 * seed + rank)

    @abstractmethod
    def build(self) -> None:
        """Make the model, the optimizers and the data."""

    @abstractmethod
    def loss(self) -> Tensor:
        """The loss of this rank's next batch; all ranks' mean is what the training minimises."""

    @abstractmethod
    def validate(self) -> Tensor:
        """The loss of what all ranks' data are drawn from, with the weights in the model."""

    def pick(self, count: int, among: int) -> Tensor:
        """Numbers of examples of the next batch: int64 ``[count]``."""
        return torch.randint(among, (count,), generator=self.draw)


def text() -> Tensor:
    """Python's own modules, byte by byte: int64."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:MODULES]
    return torch.frombuffer(
        bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8
    ).long()


class GPT2(Case):
    """GPT-2 of ``transformers``, one tied layer, norms clipped."""

    clip = 1.0
    rate = 0.003
    length = 32
    batch = 8
    width = 48

    def build(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel  # of the extra `zoo`

        shape = {
            "n_positions": self.length,
            "n_embd": self.width,
            "n_layer": 1,
            "n_head": 4,
            "vocab_size": BYTES,
        }
        drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        self.model = GPT2LMHeadModel(
            GPT2Config(**shape, **drop, bos_token_id=None, eos_token_id=None, use_cache=False)
        )
        self.optimizers = [AdamW(self.model.parameters(), self.rate)]
        whole = text()
        held_out = int(HELD_OUT * len(whole))
        self.train = whole[:-held_out]
        self.held_out = whole[-held_out:]

    def loss(self) -> Tensor:
        return self._loss(
            self._lines(self.train, self.pick(self.batch, len(self.train) - self.length))
        )

    def validate(self) -> Tensor:
        starts = torch.arange(0, len(self.held_out) - self.length, len(self.held_out) // 1_000)
        return self._loss(self._lines(self.held_out, starts))

    def _lines(self, whole: Tensor, starts: Tensor) -> Tensor:
        return whole[starts[:, None] + torch.arange(self.length)]

    def _loss(self, lines: Tensor) -> Tensor:
        logits = self.model(input_ids=lines[:, :-1]).logits
        return functional.cross_entropy(logits.flatten(0, 1), lines[:, 1:].flatten())


class GPT2WithoutClipping(GPT2):
    """The same without a bound on norms."""

    clip = None


class Domains(GPT2):
    """Each rank has its own part of the text, and some have many more tokens; the loss is that of a
    token.
    """

    clip = None
    steps = 600

    def build(self) -> None:
        super().build()
        whole = text()
        part = len(whole) // self.ranks
        held_out = int(HELD_OUT * part)
        parts = [whole[rank * part : (rank + 1) * part] for rank in range(self.ranks)]
        self.train = parts[self.rank][:-held_out]
        self.parts = [one[-held_out:] for one in parts]
        self.tokens = [240 if rank % 2 == 0 else 16 for rank in range(self.ranks)]

    def loss(self) -> Tensor:
        tokens = self.tokens[self.rank]
        lines = self._lines(
            self.train, self.pick(max(tokens // self.length, 1), len(self.train) - self.length)
        )
        return self._loss(lines) * self._weight(self.rank)

    def validate(self) -> Tensor:
        losses = []
        for rank, part in enumerate(self.parts):
            self.held_out = part
            losses.append(super().validate() * self._weight(rank))
        return torch.stack(losses).mean()

    def _weight(self, rank: int) -> float:
        return self.tokens[rank] * self.ranks / sum(self.tokens)


class DomainsBySGD(Domains):
    """The same under SGD with momentum."""

    def build(self) -> None:
        super().build()
        self.optimizers = [SGD(self.model.parameters(), 0.1, momentum=0.9)]


class Digits(Case):
    """An MLP that reads drawn digits, under AdamW."""

    steps = 1_000
    batch = 16
    rate = 0.001
    side = 16
    count = 20_000

    def build(self) -> None:
        wide = 128
        self.model = nn.Sequential(
            nn.Flatten(),
            nn.Linear(self.side**2, wide),
            nn.ReLU(),
            nn.Linear(wide, wide),
            nn.ReLU(),
            nn.Linear(wide, CLASSES),
        )
        self.optimizers = [self.optimizer()]
        images, labels = draw_digits(self.count + 4_000, self.side, 0.25, seed=0)
        self.images = images[: self.count]
        self.labels = labels[: self.count]
        self.held_out = images[self.count :], labels[self.count :]
        own = self.own(self.labels)
        self.images = self.images[own]
        self.labels = self.labels[own]

    def optimizer(self) -> Optimizer:
        return AdamW(self.model.parameters(), self.rate)

    def own(self, labels: Tensor) -> Tensor:
        """Which examples this rank may draw."""
        return torch.ones_like(labels, dtype=torch.bool)

    def loss(self) -> Tensor:
        batch = self.pick(self.batch, len(self.labels))
        return functional.cross_entropy(self.model(self.images[batch]), self.labels[batch])

    def validate(self) -> Tensor:
        images, labels = self.held_out
        return functional.cross_entropy(self.model(images), labels)


class Classes(Digits):
    """Each rank has classes of its own."""

    def own(self, labels: Tensor) -> Tensor:
        return labels % self.ranks == self.rank


class DigitsBySGD(Digits):
    """SGD with momentum, whose gradients are always clipped."""

    clip = 0.1
    rate = 0.3

    def optimizer(self) -> Optimizer:
        return SGD(self.model.parameters(), self.rate, momentum=0.9)


class DigitsBySlowSGD(DigitsBySGD):
    """The same with half the rate."""

    rate = 0.15


class Experts(Digits):
    """Each rank's data reach one of the experts behind a shared layer."""

    def build(self) -> None:
        super().build()
        wide = 64
        self.model = nn.ModuleDict(
            {
                "shared": nn.Sequential(nn.Flatten(), nn.Linear(self.side**2, wide), nn.ReLU()),
                "experts": nn.ModuleList(
                    nn.Sequential(nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, CLASSES))
                    for _ in range(self.ranks)
                ),
            }
        )
        self.optimizers = [self.optimizer()]

    def loss(self) -> Tensor:
        batch = self.pick(self.batch, len(self.labels))
        return self._loss(self.images[batch], self.labels[batch], self.rank)

    def validate(self) -> Tensor:
        images, labels = self.held_out
        return torch.stack(
            [self._loss(images, labels, expert) for expert in range(self.ranks)]
        ).mean()

    def _loss(self, images: Tensor, labels: Tensor, expert: int) -> Tensor:
        # Each expert has another task: to add its number to the digit.
        hidden = self.model["shared"](images)
        return functional.cross_entropy(
            self.model["experts"][expert](hidden), (labels + expert) % CLASSES
        )


class Contrastive(Digits):
    """Two noisy views of an image find each other among those of all ranks."""

    rate = 0.002
    temperature = 0.1

    def build(self) -> None:
        super().build()
        self.model = nn.Sequential(
            nn.Flatten(), nn.Linear(self.side**2, 128), nn.ReLU(), nn.Linear(128, 32)
        )
        self.optimizers = [self.optimizer()]

    def loss(self) -> Tensor:
        images = self.images[self.pick(self.batch, len(self.labels))]
        views = [self._features(images, self.draw) for _ in range(2)]
        if self.ranks > 1:
            views = [torch.cat(all_gather(one)) for one in views]
        return self._loss(*views)

    def validate(self) -> Tensor:
        noise = torch.Generator().manual_seed(0)
        losses = []
        for images in self.held_out[0].split(self.batch * self.ranks):
            losses.append(self._loss(self._features(images, noise), self._features(images, noise)))
        return torch.stack(losses).mean()

    def _features(self, images: Tensor, noise: torch.Generator) -> Tensor:
        view = images + 0.5 * torch.randn(images.shape, generator=noise)
        return functional.normalize(self.model(view), dim=1)

    def _loss(self, one: Tensor, other: Tensor) -> Tensor:
        return functional.cross_entropy(one @ other.T / self.temperature, torch.arange(len(one)))


class RareRows(Case):
    """Bags of rows, of which most are rare, under SparseAdam, and a layer under Adam."""

    steps = 800
    rows = 4_000
    width = 16
    bag = 6
    batch = 64
    rate = 0.01

    def build(self) -> None:
        bags = nn.EmbeddingBag(self.rows, self.width, mode="sum", sparse=True)
        nn.init.normal_(bags.weight, std=0.05)
        self.model = nn.ModuleDict({"bags": bags, "top": nn.Linear(self.width, 1)})
        top = Adam(self.model["top"].parameters(), self.rate / 3)
        self.optimizers = [SparseAdam(self.model["bags"].parameters(), self.rate), top]
        teacher = torch.Generator().manual_seed(7)
        self.effects = torch.randn(self.rows, generator=teacher)
        popularity = torch.arange(1, self.rows + 1, dtype=torch.float64) ** -0.9
        self.popularity = popularity / popularity.sum()

    def loss(self) -> Tensor:
        return self._loss(self.batch, self.draw)

    def validate(self) -> Tensor:
        return self._loss(20_000, torch.Generator().manual_seed(11))

    def _loss(self, batch: int, draw: torch.Generator) -> Tensor:
        bags = torch.multinomial(
            self.popularity, batch * self.bag, replacement=True, generator=draw
        )
        bags = bags.view(batch, self.bag)
        chance = (self.effects[bags].sum(1) / math.sqrt(self.bag) * 2).sigmoid()
        clicked = torch.bernoulli(chance, generator=draw)
        logits = self.model["top"](self.model["bags"](bags)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(logits, clicked)


CASES: dict[str, type[Case]] = {
    "gpt2": GPT2,
    "gpt2-free": GPT2WithoutClipping,
    "digits": Digits,
    "classes": Classes,
    "domains": Domains,
    "domains-sgd": DomainsBySGD,
    "contrastive": Contrastive,
    "sgd": DigitsBySGD,
    "sgd-slow": DigitsBySlowSGD,
    "rows": RareRows,
    "experts": Experts,
}


def mean_of_gradients(model: nn.Module, ranks: int) -> None:
    """Replace gradients by their mean over ranks, as DistributedDataParallel does; sparse ones stay
    sparse.
    """
    for parameter in model.parameters():
        mine = parameter.grad
        dense = torch.zeros_like(parameter) if mine is None else mine.to_dense()
        dist.all_reduce(dense)
        dense /= ranks
        is_sparse = mine is not None and mine.is_sparse
        parameter.grad = dense.to_sparse(1) if is_sparse else dense
