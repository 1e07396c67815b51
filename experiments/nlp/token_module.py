"""The common part of the language and the translation module: sizes, loss, optimizer."""

from abc import abstractmethod
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from nlp.optimizing import optimizer_with_cosine
from nlp.token_rows import IGNORED
from scored import ScoredModule


def token_figures(logits: Tensor, targets: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The mean cross-entropy in nats over the tokens that count (0 without any), and their number,
    int64.

    Logits are ``[batch, time, vocabulary]``. Targets ``[batch, time]`` equal to ``IGNORED`` do not
    count.
    """
    total = functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    count = (targets != IGNORED).sum()
    return {"loss": total / count.clamp(min=1)}, count


class TokenModule(ScoredModule):
    """A network that predicts tokens, judged by its loss in nats a token.

    Subclasses save their hyperparameters (those that ``optimizer_with_cosine`` names, the sizes,
    and ``split``: ``pieces`` and the settings of a ``SplitPoint``) and then call
    :meth:`build_when_sized`.
    """

    size_names: tuple[str, ...]
    """Hyperparameters that are read from the data module when they are None."""

    def __init__(self) -> None:
        super().__init__()
        self.network: nn.Module | None = None

    @abstractmethod
    def make_network(self, pieces: int, split: dict[str, Any]) -> nn.Module:
        """Make the network, all sizes known, in so many pieces with split points of these settings
        between them.
        """

    def build_when_sized(self) -> None:
        if all(self.hparams[name] is not None for name in self.size_names):
            split = dict(self.hparams.split or {})
            pieces = split.pop("pieces", 1)
            self.network = self.make_network(pieces, split)

    def configure_model(self) -> None:
        """Build the network with the data's sizes, once; the sizes then travel in the
        checkpoint.
        """
        if self.network is None:
            for name in self.size_names:
                self.hparams[name] = getattr(self.trainer.datamodule, name)
            self.build_when_sized()

    def configure_optimizers(self) -> dict[str, Any]:
        return optimizer_with_cosine(self)
