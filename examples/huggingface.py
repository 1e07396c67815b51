"""A model of Hugging Face's ``transformers`` inside a LightningModule: nothing about it is special.

    python huggingface.py
    python huggingface.py --sharded    # two replicas, each sharded over two ranks by FSDP2

A small GPT-2 with random weights learns the bytes of this file; ``from_pretrained`` in its place
takes trained ones. Wants ``pip install transformers``.
"""

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config

from lightning_dct import DCTFSDPStrategy


class LanguageModel(L.LightningModule):
    """Any causal language model."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}
        config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
        self.model = AutoModelForCausalLM.from_config(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def rows_of(text: bytes, length: int = 64) -> list[Tensor]:
    """The rows of ``length`` bytes that begin at each byte."""
    return list(torch.tensor(list(text)).unfold(0, length, 1))


if __name__ == "__main__":
    data = DataLoader(rows_of(Path(__file__).read_bytes()), batch_size=16, shuffle=True)
    L.seed_everything(0)
    how: dict[str, Any] = {"strategy": "dct", "devices": 2}
    if "--sharded" in sys.argv:
        how = {"strategy": DCTFSDPStrategy(replicas=2), "devices": 4}
    trainer = L.Trainer(**how, accelerator="cpu", max_steps=50)
    trainer.fit(LanguageModel(), data)
    if trainer.is_global_zero:
        print(f"{trainer.callback_metrics['loss']:.2f} nats a byte; guessing takes 5.55")
