"""What a job does when a rank dies, fails or is signalled: the others hear of it, and all end, or act, together."""

from lightning_dct.failures.lifeline import Lifeline, check_lifelines
from lightning_dct.failures.process_group import end_after_gloo, meet_in_fresh_store

__all__ = ["Lifeline", "check_lifelines", "end_after_gloo", "meet_in_fresh_store"]
