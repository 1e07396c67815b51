"""Trains what ``conf/`` describes and reports quality beside bytes: ``python experiments/train.py
experiment=lm``.

``strategy=ddp|ddp_fp16|powersgd|dct`` swaps how gradients are synchronised and nothing else. Every
setting is an override, ``strategy.density=0.001 trainer.devices=4``; ``--cfg job`` shows them all.
Lightning starts the processes, or torchrun does: ``torchrun --nproc-per-node 2 experiments/train.py
experiment=lm``. With ``--multirun`` several values, ``strategy.density=0.01,0.1 seed=0,1``, are a
run for each combination, one after the other.
"""

import gc
import inspect
import math
import os
import sys
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf
from torch.distributed import TCPStore

from jobs import is_hydra_setting, run_job_of_sweep
from lightning_dct import CompressionRatio
from lightning_dct.traffic import Traffic
from network.ledger import Ledger
from reporting import StepTimer, print_result, split_best_known, write_result


def instantiate_group(group: DictConfig | None) -> list[Any]:
    """Make the objects of a configuration group whose entries each have a ``_target_``."""
    return [hydra.utils.instantiate(entry) for entry in (group or {}).values() if entry is not None]


def make_trainer(config: DictConfig) -> Trainer:
    """Build the Trainer with its strategy, callbacks and loggers."""
    loggers: list[Logger] = instantiate_group(config.get("logger"))
    callbacks: list[Callback] = instantiate_group(config.get("callbacks"))
    if not loggers:
        # This callback raises an error without a logger.
        callbacks = [
            callback for callback in callbacks if not isinstance(callback, LearningRateMonitor)
        ]
    # Otherwise Lightning would save without the callback, too.
    saves = any(isinstance(callback, Checkpoint) for callback in callbacks)
    return hydra.utils.instantiate(
        config.trainer,
        strategy=hydra.utils.instantiate(config.strategy),
        callbacks=callbacks,
        logger=loggers or False,
        enable_checkpointing=config.trainer.get("enable_checkpointing", saves),
    )


def share_run_folder() -> None:
    """Let all ranks that torchrun starts use one folder, as with Lightning's launcher; rank 0
    describes it.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # The ranks' clocks differ, and torchrun's run id is "none" by default. So the first rank
        # names the run for all hosts, and it keeps that name after a restart.
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")
        os.environ["RUN_STARTED"] = store.compare_set("lightning_dct/run_started", "", now).decode()
    else:
        os.environ["RUN_STARTED"] = os.environ["TORCHELASTIC_RUN_ID"]
    if (rank := int(os.environ["RANK"])) > 0:
        sys.argv += ["hydra.output_subdir=null", f"hydra.job.name=train_ddp_process_{rank}"]


def collect_result(
    trainer: Trainer, module: LightningModule, metrics: dict[str, float], seed: int
) -> dict[str, Any]:
    """The content of ``result.json`` of a run that has been trained and scored; a collective call.

    ``choices`` has the file of each configuration group, ``metrics`` the figures of validation
    (``val/...``) and test (``test/...``) after the last step, and ``best_known`` those of a perfect
    model. Bytes are those of this rank; ``split_ratio`` is the ratio inside a split model, ids
    included, of all ranks. The time of a step is a mean, as are the parts of it in which this rank
    compresses and in which it waits for others, and ``history`` has the metrics of each validation.
    ``tensor_bytes`` are those of all tensors that are alive after the last step,
    ``interface_bytes_per_step`` those that this host's interface has sent, on hosts of network
    namespaces, and ``their_ratio`` is the ratio of bytes as a method's authors count it. A figure
    that the run does not have is None, or NaN.
    """
    measured, best_known = split_best_known(metrics)
    totals = getattr(trainer.strategy, "traffic", Traffic()).totals
    split = getattr(trainer.strategy, "split_traffic", Traffic()).totals
    split_ratio = CompressionRatio().to(trainer.strategy.root_device)
    split_ratio.update(split)
    ratio_of_all_ranks = float(split_ratio.compute())
    timers = [callback for callback in trainer.callbacks if isinstance(callback, StepTimer)]
    compressing, waiting = timers[0].mean_costs if timers else (None, None)
    ledgers = [callback for callback in trainer.callbacks if isinstance(callback, Ledger)]
    choices = HydraConfig.get().runtime.choices
    overrides = HydraConfig.get().overrides.task
    return {
        "choices": {
            group: choice for group, choice in choices.items() if not group.startswith("hydra")
        },
        "overrides": list(overrides),
        "seed": seed,
        "world_size": trainer.world_size,
        "steps": trainer.global_step,
        "metrics": measured,
        "best_known": best_known,
        "compression_ratio": totals.compression_ratio if totals.steps else None,
        "bytes_sent_per_step": totals.bytes_sent / totals.steps if totals.steps else None,
        "bytes_dense_per_step": totals.bytes_dense / totals.steps if totals.steps else None,
        "split_ratio": None if math.isnan(ratio_of_all_ranks) else ratio_of_all_ranks,
        "split_bytes_per_step": split.bytes_sent / split.steps if split.steps else None,
        "split_bytes_dense_per_step": split.bytes_dense / split.steps if split.steps else None,
        "milliseconds_per_step": timers[0].mean_milliseconds if timers else None,
        "milliseconds_compressing": compressing,
        "milliseconds_waiting": waiting,
        "tensor_bytes": timers[0].tensor_bytes if timers else None,
        "interface_bytes_per_step": ledgers[0].bytes_per_step if ledgers else None,
        "their_ratio": getattr(trainer.strategy, "their_ratio", None),
        "history": timers[0].history if timers else [],
        "trainable_parameters": sum(p.numel() for p in module.parameters() if p.requires_grad),
    }


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(config: DictConfig) -> None:
    """Train, score and report one run, on every rank; or start a job of ``--multirun``."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        run_job_of_sweep()
        return
    seed_everything(config.seed, workers=True)
    data = hydra.utils.instantiate(config.data)
    module = hydra.utils.instantiate(config.model)
    trainer = make_trainer(config)

    trainer.fit(module, datamodule=data, ckpt_path=config.ckpt_path)
    # The last validation within fit may be some steps old.
    scores = trainer.validate(module, datamodule=data, verbose=False)
    if config.test:
        scores += trainer.test(module, datamodule=data, verbose=False)

    metrics = {name: float(value) for stage in scores for name, value in stage.items()}
    result = collect_result(trainer, module, metrics, config.seed)
    if trainer.is_global_zero:
        write_result(Path(config.paths.output_dir) / "result.json", result)
        print_result(result)


def is_argument(config: Any, key: str) -> bool:
    """Whether what a configuration describes takes an argument of that name."""
    return (
        "_target_" in config
        and key in inspect.signature(hydra.utils.get_object(config._target_)).parameters
    )


def suggest(words: list[str]) -> str | None:
    """What a command line may have meant by the name of a setting that does not exist; None if all
    exist.
    """
    given = [word for word in words if "=" in word or word.startswith("~")]
    overrides = [word for word in given if word[0] != "-" and not is_hydra_setting(word)]
    with initialize_config_dir(
        str(Path(__file__).resolve().parents[1] / "conf"), version_base="1.3"
    ):
        try:
            compose("train", overrides)
        except HydraException as error:
            name = getattr(error.__cause__, "full_key", None) or ""
            group, _, key = name.rpartition(".")
            wrong = [word for word in overrides if word.partition("=")[0] == name]
            rest = [word for word in overrides if word not in wrong]
            if name and wrong:
                config: Any = (
                    OmegaConf.select(compose("train", rest), group)
                    if group
                    else compose("train", rest)
                )
                if is_argument(config, key):
                    return (
                        f"An argument that no file in conf/ has needs a plus sign: `+{wrong[0]}`."
                    )
                nearest = [
                    f"`{group}.{other}`".replace("`.", "`")
                    for other in get_close_matches(key, list(config))
                ]
                return (
                    f"Did you mean {' or '.join(nearest)}?"
                    if nearest
                    else f"There are: {', '.join(config)}."
                )
    return None


if __name__ == "__main__":
    gc.freeze()  # each fit collects garbage; all that is imported is none
    share_run_folder()
    if {"--help", "-h"}.intersection(sys.argv) and not any(
        word.startswith("experiment=") for word in sys.argv
    ):
        # Hydra's help shows a configuration, which needs an experiment.
        sys.argv.append("experiment=lm")
    try:
        main()
    except SystemExit as left:
        if left.code and (hint := suggest(sys.argv[1:])):
            print(hint, file=sys.stderr)
        raise
