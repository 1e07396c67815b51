"""Connects ranks so that all of them end together when one dies or fails, and act together on a signal."""

from lightning_dct.failures.lifeline import Lifeline, check_lifelines
from lightning_dct.failures.process_group import group_is_made

__all__ = ["Lifeline", "check_lifelines", "group_is_made"]
