"""GPT-2 of Hugging Face's `transformers`, small and from scratch, under AdamW, or under Muon with
AdamW beside it.
"""

from typing import Any

import torch
from torch import Tensor

from nlp.optimizing import optimizer_with_cosine, warmup_and_cosine
from nlp.token_module import token_figures
from scored import ScoredModule

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "experiment=zoo/gpt needs transformers: pip install '.[zoo]'"
    ) from error


class GPTModule(ScoredModule):
    """A small GPT-2 under AdamW with warm-up and cosine; the Trainer clips its gradients.

    Args:
        dropout: Fraction of embeddings, attention weights and outputs dropped while training.
    """

    def __init__(
        self,
        learning_rate: float,
        vocabulary_size: int = 256,
        context_length: int = 64,
        width: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        dropout: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        warmup_steps: int = 100,
        final_learning_rate_fraction: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=vocabulary_size, n_positions=context_length, n_embd=width, n_layer=num_layers,
                n_head=num_heads, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
                bos_token_id=None, eos_token_id=None, use_cache=False,
            )
        )  # fmt: skip

    def figures(self, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        return token_figures(self.network(input_ids=batch["inputs"]).logits, batch["targets"])

    def configure_optimizers(self) -> Any:
        return optimizer_with_cosine(self)


class MuonGPTModule(GPTModule):
    """The same with torch's Muon for the matrices of the blocks, and AdamW for embeddings, norms
    and biases.

    Two optimizers of one loss: manual optimisation, as Lightning wants it.

    Args:
        gradient_clip: Largest norm of all gradients together.
        **settings: Of :class:`GPTModule`; the learning rate is that of both, for Muon's updates are
            scaled to the size of AdamW's.
    """

    def __init__(self, gradient_clip: float = 1.0, **settings: Any) -> None:
        super().__init__(**settings)
        self.save_hyperparameters("gradient_clip")
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        settings = self.hparams
        matrices = [p for p in self.network.transformer.h.parameters() if p.ndim == 2]
        taken = set(matrices)
        others = [p for p in self.parameters() if p not in taken]
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices,
                settings.learning_rate,
                settings.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(
                others, settings.learning_rate, tuple(settings.betas), weight_decay=0.0
            ),
        ]
        # The Trainer counts the steps of all optimizers.
        batches = self.trainer.estimated_stepping_batches / len(optimizers)
        factor = warmup_and_cosine(
            batches, settings.warmup_steps, settings.final_learning_rate_fraction
        )
        return optimizers, [
            torch.optim.lr_scheduler.LambdaLR(optimizer, factor) for optimizer in optimizers
        ]

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        figures, _ = self.figures(batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(figures["loss"])
        torch.nn.utils.clip_grad_norm_(self.parameters(), self.hparams.gradient_clip)
        for optimizer in self.optimizers():
            optimizer.step()
        for schedule in self.lr_schedulers():
            schedule.step()
