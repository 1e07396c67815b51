"""Hugging Face's own ``Trainer``: a callback exchanges updates of the weights, instead of
DistributedDataParallel.

    torchrun --nproc-per-node=2 huggingface_trainer.py
    torchrun --nproc-per-node=2 huggingface_trainer.py --resume    # from the last checkpoint

A small GPT-2 with random weights learns the bytes of this file. Wants ``pip install
'transformers[torch]'``.
"""

import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from lightning_dct import Updates


class ExchangeUpdates(TrainerCallback):
    """Exchanges updates while a ``Trainer`` trains; evaluations, saves and all that follows see the
    shared weights.

    Args:
        trainer: Not trained yet; torchrun or ``accelerate launch`` has started its processes.
        **settings: Those of :class:`~lightning_dct.Updates`.
    """

    def __init__(self, trainer: Trainer, **settings: Any) -> None:
        if trainer.args.fp16:
            raise ValueError(
                "With `fp16=True` a rank may skip a step, and the others would wait. Use"
                " `bf16=True`."
            )
        self.trainer = trainer
        self.settings = settings
        self.shared = ExitStack()
        # The accelerator then prepares precision and device, and does not wrap the model.
        trainer.accelerator.prepare_model = partial(
            trainer.accelerator.prepare_model, evaluation_mode=True
        )

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any, **kwargs: Any
    ) -> None:
        if isinstance(self.trainer.model_wrapped, DistributedDataParallel):
            raise RuntimeError(
                "The Trainer has wrapped the model. Make the callback before the first training."
            )
        self.optimizer = optimizer.optimizer  # without accelerate's wrapper
        self.updates = Updates(
            self.trainer.model, self.optimizer, steps=state.max_steps, **self.settings
        )
        if state.global_step:  # resumed
            saved = torch.load(self.path(args, state))
            self.updates.load_state_dict(saved["updates"])
            self.optimizer.load_state_dict(saved["optimizer"])

    def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
        self.shared.close()  # training continues with this rank's own weights

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_evaluate or control.should_save or control.should_training_stop:
            self.shared.close()
            self.shared.enter_context(self.updates.shared_weights())

    on_epoch_end = on_step_end

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        own = {"updates": self.updates.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(own, self.path(args, state))

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        self.updates.close()

    def path(self, args: TrainingArguments, state: Any) -> Path:
        """This rank's file in a checkpoint of the Trainer."""
        return Path(
            args.output_dir, f"checkpoint-{state.global_step}", f"dct_{args.process_index}.pt"
        )


def make_trainer(**arguments: Any) -> Trainer:
    """What the user has already: a model, data and arguments."""
    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = AutoModelForCausalLM.from_config(
        GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    )
    rows = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, 64, 1)
    data = [{"input_ids": row, "labels": row} for row in rows]
    usual = {
        "output_dir": "huggingface_trainer",
        "max_steps": 50,
        "learning_rate": 1e-2,
        "use_cpu": True,
    }
    usual |= {"eval_strategy": "steps", "eval_steps": 25, "save_steps": 25, "report_to": "none"}
    # Otherwise all ranks would tell each other a number in each step.
    usual |= {"average_tokens_across_devices": False}
    return Trainer(
        model,
        TrainingArguments(**{**usual, **arguments}),
        train_dataset=data,
        eval_dataset=data[::16],
    )


if __name__ == "__main__":
    trainer = make_trainer()
    exchange = ExchangeUpdates(trainer)  # settings such as density=0.03 come here
    trainer.add_callback(exchange)
    trainer.train(resume_from_checkpoint="--resume" in sys.argv)
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        ratio = exchange.updates.traffic.totals.compression_ratio
        print(
            f"{loss:.2f} nats a byte; guessing takes 5.55; {ratio:.0f}x fewer bytes than dense fp32"
        )
