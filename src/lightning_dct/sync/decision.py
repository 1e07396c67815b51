"""What the ranks do after an optimizer step, decided from the step's number, the settings and the
optimizer alone.
"""

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from lightning_dct.compress.bucket_plan import Gain
from lightning_dct.config import DCTConfig
from lightning_dct.sync.coherence import SELDOM, Coherence, is_measured


class Length(Enum):
    """What makes the mean of updates as long as a step of DistributedDataParallel."""

    PLAIN = "the mean as it is"
    BY_SENDERS = "times sqrt(W / n) where n of W ranks have sent an entry"
    MEASURED = "times sqrt(W / R), R from how far the ranks' gradients agree"
    OF_ALL = "the same with one R for all tensors, at most W / n"

    @property
    def is_measured(self) -> bool:
        """Whether it goes by how far the ranks' gradients agree."""
        return self in (Length.MEASURED, Length.OF_ALL)


# Densities below are few entries: they wait so long that one gain for all tensors is better.
FEW = 0.05


class Decision(NamedTuple):
    """What follows an optimizer step; the same on all ranks.

    Attributes:
        length: Optimizer steps since the buckets that are due were last exchanged.
        is_exchanged: Whether buckets that do not take turns are due.
        measures: Whether the ranks measure how far their gradients agree.
        agrees_on_decay: Whether they compare by how much weights decay.
        holds_back: Whether own weights are without residuals, because the ranks pull in opposite
            directions.
        kept: What remains of a residual.
        mean: What makes the mean as long as it has to be.
        averages_buffers: Whether buffers are exchanged, too.
    """

    length: int
    is_exchanged: bool
    measures: bool
    agrees_on_decay: bool
    holds_back: bool
    kept: float
    mean: Length
    averages_buffers: bool

    def gains(self, coherence: Coherence) -> Mapping[str, Gain]:
        """The gains on means by parameter, where they are not 1."""
        return coherence.gains() if self.mean.is_measured else {}

    def gain(self, coherence: Coherence) -> float | None:
        """The gain on means of all compressed tensors, where they have none of their own; None for
        ``sqrt(W / n)``.
        """
        if self.mean is Length.BY_SENDERS:
            return None
        return coherence.gain_of_all if self.mean is Length.OF_ALL else 1.0


def decide(
    step: int,
    config: DCTConfig,
    *,
    is_scale_invariant: bool,
    clips_by_norm: bool = False,
    is_ending: bool = False,
    are_opposed: bool = False,
) -> Decision:
    """Decide what follows optimizer step number ``step``, from 1 on.

    Args:
        step: Of one optimizer.
        config: The settings that hold by now.
        is_scale_invariant: Whether the optimizer's steps do not grow with their gradients, as those
            of Adam.
        clips_by_norm: Whether gradients are clipped by the norm of their mean, for which coherence
            is measured.
        is_ending: Whether this is the last part of a long run.
        are_opposed: Whether the ranks' gradients cancel each other.
    """
    length = config.length_at(step)
    # Longer means go further in as many steps. At the end of a long run their noise costs more than
    # that gains.
    if not is_scale_invariant or is_ending:
        mean = Length.PLAIN
    elif not config.exchanges_every_step:
        mean = Length.BY_SENDERS
    elif config.density < FEW and not are_opposed:
        mean = Length.OF_ALL
    else:
        mean = Length.MEASURED
    is_used = mean.is_measured or clips_by_norm
    # A residual that own weights do not contain keeps no ranks apart.
    holds_back = are_opposed and not config.overlap_steps
    loses_residuals = step <= config.warmup_steps and not holds_back
    return Decision(
        length=length,
        is_exchanged=step % length == 0,
        measures=is_used and length == 1 and is_measured(step),
        agrees_on_decay=is_measured(step) if length == 1 else step % (SELDOM * length) == 0,
        holds_back=holds_back,
        kept=config.kept_of_residuals(is_scale_invariant) if loses_residuals else 1.0,
        mean=mean,
        # Training does not use the running statistics of a BatchNorm, so warm-up does not send them
        # more often.
        averages_buffers=step % config.local_steps == 0,
    )
