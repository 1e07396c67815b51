"""Harms payloads and checkpoints at random and looks at what the decoders make of them.

    python tests/reliability/fuzz.py --payloads 100000 --checkpoints 1000

There may be an error that says what is wrong, or a right answer. A right answer is one within what
the layout promises (see ``wires.py``), for a checkpoint the very state that was saved (see
``states.py``). Anything else is counted and shown: other kinds of errors, answers out of bounds,
errors without a message. A decoder that hangs or crashes ends this program, with a trace.
"""

import argparse
import faulthandler
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from reliability.mutations import mutate
from reliability.states import CheckpointCases
from reliability.wires import as_tensor, messages

# A single decoding takes milliseconds.
HANGS_AFTER_S = 120


class Outcome(NamedTuple):
    """What was harmed, and ``"error"``, ``"right"`` or, for anything else, what happened."""

    subject: str
    verdict: str


def judge(decode: Callable[[], None], says: str = "", kind: type[ValueError] = ValueError) -> str:
    """Call a decoder and say what it did; errors must be of a kind and their messages hold
    ``says``.
    """
    try:
        decode()
    except kind as error:
        return (
            "error"
            if str(error).strip() and says in str(error)
            else f"an error that says {str(error)!r}"
        )
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "right"


def fuzz_payloads(count: int, seed: int) -> Iterable[Outcome]:
    """Harm messages, one after the other in turn."""
    chance = random.Random(seed)
    valid = messages(seed)
    data = [message.data for message in valid]
    for message in valid:
        verdict = judge(lambda message=message: message.decode(as_tensor(message.data)))
        assert verdict == "right", (message.wire, verdict)
    for number in range(count):
        message = valid[number % len(valid)]
        harmed = as_tensor(mutate(chance, message.data, data))
        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
        yield Outcome(
            message.wire, judge(lambda message=message, harmed=harmed: message.decode(harmed))
        )
    faulthandler.cancel_dump_traceback_later()


def fuzz_checkpoints(count: int, seed: int, folder: Path) -> Iterable[Outcome]:
    """Harm files of checkpoints, their bytes and what they hold."""
    chance = random.Random(seed)
    cases = CheckpointCases(seed, folder)
    for number in range(count):
        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
        subject, decode, says, kind = cases.next(chance, number)
        yield Outcome(subject, judge(decode, says, kind))
    faulthandler.cancel_dump_traceback_later()


def main() -> int:
    """Run both and print a table; the exit status is 1 when there was anything else."""
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--payloads", type=int, default=100_000)
    parser.add_argument("--checkpoints", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    counts: dict[str, Counter[str]] = {}
    others: Counter[Outcome] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        runs = (
            (fuzz_payloads(options.payloads, options.seed), options.payloads, "payloads"),
            (
                fuzz_checkpoints(options.checkpoints, options.seed, Path(folder)),
                options.checkpoints,
                "checkpoints",
            ),
        )
        for outcomes, total, what in runs:
            for outcome in track(outcomes, what, total=total):
                verdict = (
                    outcome.verdict if outcome.verdict in ("error", "right") else "anything else"
                )
                counts.setdefault(outcome.subject, Counter())[verdict] += 1
                if verdict == "anything else":
                    others[outcome] += 1
    table = Table(title=f"Harmed at random, seed {options.seed}")
    for heading in ("what", "mutations", "errors", "right answers", "anything else"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for subject, verdicts in counts.items():
        cells = (verdicts.total(), verdicts["error"], verdicts["right"], verdicts["anything else"])
        table.add_row(subject, *(f"{cell:,}" for cell in cells))
    table.add_section()
    total_of = sum(counts.values(), Counter[str]())
    cells = (total_of.total(), total_of["error"], total_of["right"], total_of["anything else"])
    table.add_row("all", *(f"{cell:,}" for cell in cells))
    console = Console()
    console.print(table)
    for outcome, times in others.most_common(20):
        console.print(f"{times} x {outcome.subject}: {outcome.verdict}", markup=False)
    return int(bool(others))


if __name__ == "__main__":
    sys.exit(main())
