"""What a job does when one of its ranks dies or fails: the others hear of it within seconds, by name, and end."""

from lightning_dct.failures.lifeline import Lifeline
from lightning_dct.failures.process_group import end_after_gloo, meet_in_fresh_store

__all__ = ["Lifeline", "end_after_gloo", "meet_in_fresh_store"]
