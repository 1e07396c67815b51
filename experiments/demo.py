"""Shows in three minutes what the package does: two trainings on two ranks, dense and with ``dct``.

    python experiments/demo.py

It prints one table and draws one picture. The time of a step on a slow link is computed as
``lightning-dct plan`` does: counted bytes over the rate of the link. To it come what a rank
computes and compresses in a step, as measured in the run with ``dct``. A run that is there already
is not repeated.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from comparison.runs import Runner, Strategy, plan_run
from comparison.table import higher_is_better, main_metric, markdown, plt
from lightning_dct.cost.forecast import layout_of, link_seconds
from lightning_dct.traffic import rate_text
from zoo.table import ALLOWED

LINK = 100e6
RANKS = 2
COMMON = (f"trainer.devices={RANKS}", "trainer.accelerator=cpu", "logger=none")
# Sharded tables whose rows, and MLPs whose gradients, cross whole: what `ddp` is to a model that
# fits on every rank.
DENSE_TABLES = (
    "dense: dct strategy.compress=gradients strategy.density=1.0 model.exchange.density=1.0"
    " model.exchange.value_format=fp32"
)
TRAININGS = {
    "recommender (DLRM)": (
        "experiment=dlrm data.batches_per_epoch=100 data.eval_rows=20000 trainer.max_epochs=4",
        DENSE_TABLES,
    ),
    "language model": (
        (
            "experiment=lm data.context_length=64 data.batch_size=4 trainer.max_steps=700"
            " trainer.val_check_interval=175"
        ),
        "ddp",
    ),
}
"""By name: what both runs share, and the dense one."""
NEXT = """What to do next:
- Change two lines of your own program: README.md, "Change two lines".
- What would your model send? .venv/bin/python -m lightning_dct plan --world-size 4 --link 100Mbit --parameters 25M
- With Linux and root, measure the time on a link instead:
  sudo .venv/bin/python experiments/compare.py experiment=lm trainer.max_steps=1000 --hosts 2 --link 100 \\
      --strategy ddp --strategy dct
- Is your run long enough, and is this for you? docs/settings.md"""

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Shown:
    """A training with both exchanges: its name, and the content of each ``result.json``."""

    name: str
    dense: Result
    dct: Result

    @property
    def metric(self) -> str:
        """What quality is judged by."""
        return main_metric(self.dense["metrics"])

    @property
    def quality(self) -> str:
        """On test data; level if what is lost or gained is less than one seed can tell."""
        before, after = (
            result["metrics"][f"test/{self.metric}"] for result in (self.dense, self.dct)
        )
        lost = (before - after) if higher_is_better(self.metric) else after / before - 1
        allowed = ALLOWED[self.metric]
        said = "level" if abs(lost) <= allowed else "better" if lost < 0 else "worse"
        return f"{self.metric} {before:.3f} → {after:.3f}, {said}"

    @property
    def bytes_of_both(self) -> tuple[float, float]:
        """Bytes that a rank sends in a step: of the dense fp32 exchange of the same tensors and
        rows, of ``dct``.
        """
        figures = self.dct
        dense = figures["bytes_dense_per_step"] + (figures["split_bytes_dense_per_step"] or 0.0)
        return dense, figures["bytes_sent_per_step"] + (figures["split_bytes_per_step"] or 0.0)

    @property
    def milliseconds_of_both(self) -> tuple[float, float]:
        """The time of a step on the link: what a rank computes, what it compresses, and the bytes
        on the link.
        """
        compressing = self.dct["milliseconds_compressing"]
        rest = self.dct["milliseconds_per_step"] - compressing - self.dct["milliseconds_waiting"]
        dense, sent = (1e3 * seconds_on_link(count) for count in self.bytes_of_both)
        return rest + dense, rest + compressing + sent


def seconds_on_link(num_bytes: float) -> float:
    """How long ``plan`` says that the link of each rank is busy with so many bytes."""
    return link_seconds(
        torch.tensor([[round(num_bytes), 0]] * RANKS), layout_of(RANKS, RANKS), LINK
    )


def table(trainings: Sequence[Shown]) -> str:
    """The table, and how to read it."""
    link = rate_text(LINK)
    rows = [
        [
            "training, steps",
            "quality on test data",
            "kB a step",
            "fewer bytes",
            f"ms a step at {link}, computed",
        ]
    ]
    for one in trainings:
        dense, sent = one.bytes_of_both
        rows.append(
            [
                f"{one.name}, {one.dct['steps']:,}",
                one.quality,
                f"{dense / 1e3:,.0f} → {sent / 1e3:,.1f}",
                f"{dense / sent:,.0f}x",
                "{:,.0f} → {:,.0f}".format(*one.milliseconds_of_both),
            ]
        )
    return markdown(
        rows,
        [
            (
                "Left of each arrow: the dense exchange in fp32, which is `ddp`, and for the"
                " recommender all-to-all of rows and ids of sharded tables. Right: `dct` with its"
                f" defaults. {RANKS} processes of this machine, one seed."
            ),
            (
                f"Level: within {ALLOWED['auc']:g} AUC or {ALLOWED['loss']:.0%} of the loss, as two"
                " runs may differ."
            ),
            (
                f"The time is computed, not measured: counted bytes at {link}, as `lightning-dct"
                " plan` does, and what a rank computed and compressed in a step here. It leaves"
                " out round trips, and assumes that backward hides nothing."
            ),
        ],
    )


def draw(file: Path, trainings: Sequence[Shown]) -> None:
    """Draw validation over the computed seconds of training on the link, a part for each
    training.
    """
    figure, axes = plt.subplots(
        1, len(trainings), figsize=(10, 4.5), layout="constrained", squeeze=False
    )
    for axis, one in zip(axes[0], trainings, strict=True):
        name = f"val/{one.metric}"
        of_both = zip(
            ("dense", "dct"),
            (one.dense, one.dct),
            one.milliseconds_of_both,
            ("black", "C0"),
            strict=True,
        )
        for label, result, milliseconds, colour in of_both:
            found = [
                (point["step"] * milliseconds / 1e3, point["metrics"][name])
                for point in result["history"]
            ]
            axis.plot(*zip(*found, strict=True), marker=".", color=colour, label=label)
        axis.set(
            xscale="log",
            xlabel=f"seconds at {rate_text(LINK)}, computed",
            ylabel=name,
            title=one.name,
        )
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main(words: Sequence[str] | None = None) -> int:
    """Train what is missing, print the table and what to do next, and draw the picture; 0 if all
    runs are there.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/demo"), help="folder of the runs"
    )
    output = parser.parse_args(words).output
    runner = Runner(ranks=RANKS)
    trainings = []
    for name, (settings, dense) in TRAININGS.items():
        common = [*settings.split(), *COMMON]
        done = [
            runner.get(plan_run(common, Strategy.parse(text), (), 0, output))
            for text in (dense, "dct")
        ]
        if None not in done:
            trainings.append(Shown(name, *(run.result for run in done if run is not None)))
    if trainings:
        text = table(trainings)
        (output / "table.md").write_text(text)
        draw(output / "demo.png", trainings)
        picture = (
            f"The picture: {output / 'demo.png'}, validation over the time of training at"
            f" {rate_text(LINK)}."
        )
        print(f"\n{text}\n{picture}\n\n{NEXT}")
    return 1 if runner.problems else 0


if __name__ == "__main__":
    sys.exit(main())
