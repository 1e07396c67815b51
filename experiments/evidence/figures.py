"""The figures of the present version that pages show, and the command that makes each."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import compare
import replicas
import unlike_ranks

LM = ("experiment=lm",)
SMALL = (*LM, "model.width=64", "data.context_length=64", "data.batch_size=4")
HUNDREDTH = "dct strategy.local_steps=1 strategy.density=0.015"


class Figure(NamedTuple):
    """A line of the README's table: a training under dense communication, and compressed.

    Attributes:
        name: In the file of results, and for the command line.
        title: The first cell, as Markdown.
        ranks: The second cell.
        program: The command's main function, ``compare`` or another.
        words: What it is given, without strategies, seeds and the folder of the results.
        strategies: The dense one, and the compressed one.
        metric: ``"loss"``, ``"auc"``, or ``"ms"``: milliseconds a step.
        seeds: Those that the table should have.
        in_readme: Whether README.md and docs/index.md show it, and not only the page of evidence.
    """

    name: str
    title: str
    ranks: int
    program: Callable[[Sequence[str]], int]
    words: tuple[str, ...]
    strategies: tuple[str, str] = ("ddp", "dct")
    metric: str = "loss"
    seeds: tuple[int, ...] = (0, 1, 2)
    in_readme: bool = True

    def command(self, seeds: Sequence[int]) -> list[str]:
        """What the program is given, but for the folder of the results."""
        strategies = [word for strategy in self.strategies for word in ("--strategy", strategy)]
        return [*self.words, "--seeds", *map(str, seeds), *strategies]


def _of_ranks(ranks: int, *words: str) -> Figure:
    page = "docs/evidence/quality.md#one-thousand-steps"
    title = f"[language model]({page}) of 479,000 parameters, 1,000 steps"
    steps = ("trainer.max_steps=1000", f"trainer.devices={ranks}")
    return Figure(f"lm-{ranks}", title, ranks, compare.main, (*LM, *steps, *words))


def _at_a_hundredth(name: str, method: str, strategy: str, in_readme: bool) -> Figure:
    """A method at about 125 times fewer bytes, in the training of ``lm-2``."""
    title = f"[{method}](docs/evidence/other_methods.md#one-thousand-steps), the same training"
    steps = ("trainer.max_steps=1000", "trainer.devices=2")
    return Figure(
        name,
        title,
        2,
        compare.main,
        (*LM, *steps),
        strategies=("ddp", strategy),
        in_readme=in_readme,
    )


def _step(link: int, rate: str, in_readme: bool) -> Figure:
    """The time of a step of ``lm-2`` on two hosts, with the settings that it takes."""
    page = "docs/evidence/other_methods.md#milliseconds-a-step"
    steps = ("trainer.max_steps=74", "trainer.val_check_interval=74")
    words = ("callbacks.step_timer.skip=10", "logger=none", "--hosts", "2", "--link", str(link))
    return Figure(
        f"step-{link}",
        f"[a step of it on a link of {rate}]({page})",
        2,
        compare.main,
        (*LM, *steps, *words),
        strategies=("ddp", "dct strategy.local_steps=1 strategy.density=0.1"),
        metric="ms",
        in_readme=in_readme,
    )


def _unlike(name: str, case: str, ranks: int, title: str) -> Figure:
    page = f"[{title}](docs/evidence/quality.md#ranks-whose-data-differ)"
    words = ("--only", case, "--ranks", str(ranks))
    return Figure(name, page, ranks, unlike_ranks.main, words, in_readme=False)


FIGURES = (
    Figure(
        "recommender",
        "[recommender](docs/evidence/recommender.md): DLRM, made-up clicks, 4,000 steps",
        2,
        compare.main,
        ("experiment=dlrm", "data.batches_per_epoch=2000"),
        metric="auc",
    ),
    _of_ranks(2),
    _step(1000, "1 Gbit/s", in_readme=False),
    _step(100, "100 Mbit/s", in_readme=True),
    _at_a_hundredth(
        "lm-2-hundredth",
        "`dct` with 3% of the entries",
        "dct strategy.local_steps=1 strategy.density=0.03",
        in_readme=False,
    ),
    _at_a_hundredth(
        "sparse-loco",
        "SparseLoCo instead of `dct`",
        "sparse_loco strategy.method.sync_every=2 strategy.method.top_k=128",
        in_readme=True,
    ),
    _of_ranks(4),
    _of_ranks(8, "model.learning_rate=0.01"),
    Figure(
        "lm-long",
        "[language model](docs/evidence/quality.md#twelve-thousand-steps) of 137,000 parameters,"
        " 12,000 steps, 1.5%",
        4,
        replicas.main,
        (*SMALL, "--ranks", "4", "--steps", "12000", "--rates", "0.003"),
        ("ddp", HUNDREDTH),
    ),
    Figure(
        "stages",
        "[activations between two stages](docs/evidence/stages_and_shards.md#width-256),"
        " 3,000 steps",
        1,
        compare.main,
        (
            *(*LM, "data=documentation", "model.width=256", "model.learning_rate=0.0014"),
            *("model.embedding_gain=5", "data.batch_size=8", "trainer.devices=1"),
            *("trainer.max_steps=3000", "trainer.val_check_interval=1000"),
        ),
        ("none", "dct strategy.density=1.0 model.split.pieces=2"),
    ),
    _unlike("clipped", "gpt2", 4, "GPT-2 with clipped norms, 500 steps"),
    _unlike("classes", "classes", 2, "each rank has its own classes, 1,000 steps"),
)
