"""When a rank dies, fails or is signalled, the others learn of it, and all ranks end, or act, together."""

from lightning_dct.failures.lifeline import Lifeline, check_lifelines
from lightning_dct.failures.process_group import group_is_made

__all__ = ["Lifeline", "check_lifelines", "group_is_made"]
