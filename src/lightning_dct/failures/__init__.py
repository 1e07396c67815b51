"""What a job does when one of its ranks dies or fails: the others hear of it within seconds, by name, and end."""

from lightning_dct.failures.lifeline import Lifeline

__all__ = ["Lifeline"]
