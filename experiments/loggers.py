"""A logger for Weights & Biases that is online only if the user is logged in."""

import netrc
import os
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import WandbLogger

_WANDB_HOST = "api.wandb.ai"


def logged_in_to_wandb() -> bool:
    """Whether there is a W&B key, in ``WANDB_API_KEY`` or in the netrc file that ``wandb login``
    writes.
    """
    if os.environ.get("WANDB_API_KEY"):
        return True
    file = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        return netrc.netrc(str(file)).authenticators(_WANDB_HOST) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def wandb_logger(offline: bool | None = None, **settings: Any) -> WandbLogger:
    """Make a W&B logger; with ``offline=None`` it is offline unless the user is logged in."""
    if offline is None:
        offline = not logged_in_to_wandb()
    save_dir = settings.get("save_dir")
    if save_dir is not None:
        # wandb uses the temporary folder if this one is missing.
        Path(save_dir).mkdir(parents=True, exist_ok=True)
    return WandbLogger(offline=offline, **settings)
