"""Fine-tunes a frozen language model through low-rank matrices beside its own (LoRA; Hu et al.,
2021).

The base is trained on Python's documentation for a few steps; the fine-tuning uses the source of
Python's library.
"""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nlp.data import TextData, documentation
from nlp.model import TransformerLanguageModel
from nlp.optimizing import optimizer_with_cosine
from nlp.token_module import token_figures
from scored import ScoredModule

_SOURCES = (
    "argparse",
    "ast",
    "datetime",
    "doctest",
    "inspect",
    "pdb",
    "pickle",
    "subprocess",
    "tarfile",
    "typing",
)


class LibrarySource(TextData):
    """Windows of the source code of some modules of Python's library."""

    def read(self) -> bytes:
        """The modules, one after the other."""
        specs = [importlib.util.find_spec(name) for name in _SOURCES]
        return b"\n\n".join(
            Path(spec.origin).read_bytes() for spec in specs if spec and spec.origin
        )


class LowRankLinear(nn.Module):
    """A frozen linear layer, plus the product of two narrow matrices that are trained; the second
    begins at 0.
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = scale
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``."""
        return self.base(hidden) + self.scale * self.up(self.down(hidden))


class LoRAModule(ScoredModule):
    """Trains low-rank additions to the blocks' linear layers of a language model, under AdamW.

    Args:
        rank: Of the additions.
        scale: What the additions are multiplied by.
        base_steps: Steps that the base is trained before.
    """

    def __init__(
        self,
        learning_rate: float,
        rank: int = 8,
        scale: float = 2.0,
        vocabulary_size: int = 256,
        context_length: int = 64,
        width: int = 128,
        num_layers: int = 2,
        base_steps: int = 300,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        warmup_steps: int = 50,
        final_learning_rate_fraction: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network: nn.Module | None = None

    def configure_model(self) -> None:
        """Train the base, the same in every run, then freeze it and put the additions beside it;
        once.
        """
        if self.network is not None:
            return
        settings = self.hparams
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.network = TransformerLanguageModel(
                settings.vocabulary_size,
                settings.context_length,
                settings.num_layers,
                settings.width,
            )
            train_base(self.network, settings.base_steps, settings.context_length)
        self.network.requires_grad_(False)
        for name, layer in list(self.network.named_modules()):
            if isinstance(layer, nn.Linear) and name.startswith("block"):
                self.network.set_submodule(
                    name, LowRankLinear(layer, settings.rank, settings.scale)
                )

    def figures(self, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        return token_figures(self.network(batch["inputs"]), batch["targets"])

    def configure_optimizers(self) -> dict[str, Any]:
        return optimizer_with_cosine(self)


def train_base(network: nn.Module, steps: int, context_length: int, batch_size: int = 8) -> None:
    """Train a language model on Python's documentation, from torch's generator as it stands."""
    text = torch.frombuffer(bytearray(documentation()), dtype=torch.uint8).long()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for _ in range(steps):
        starts = torch.randint(len(text) - context_length, (batch_size, 1))
        window = text[starts + torch.arange(context_length + 1)]
        figures, _ = token_figures(network(window[:, :-1]), window[:, 1:])
        optimizer.zero_grad()
        figures["loss"].backward()
        optimizer.step()
