"""``lightning-dct report RUN_DIR...``: one HTML page out of the logs of one or several runs."""

import argparse
import sys
from pathlib import Path

from lightning_dct.commands import writing
from lightning_dct.config import UsageError
from lightning_dct.report.find_runs import read_all
from lightning_dct.report.quality import find_quality, logged_names

_EPILOG = """\
A RUN_DIR holds the metrics.csv of Lightning's CSVLogger or an offline W&B run, or several such folders. The page needs
no network and no other file. Problems of reading are listed here and on the page.

exit status: 0 when every RUN_DIR gave its runs, 1 otherwise"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="a run, or NAME=RUN_DIR to name it")
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="(default: report.html)")
    parser.add_argument("--metric", metavar="NAME", help="the quality shown (default: found, as val/loss or val/auc)")
    parser.add_argument("--title", default="Run report", help="the page's heading (default: Run report)")


def run(arguments: argparse.Namespace) -> int:
    """Read the runs and write the page."""
    # It imports matplotlib.
    from lightning_dct.report.page import make_page, write_page

    with writing(arguments.output, b"<!doctypehtml", "an HTML page"):
        reading = read_all(arguments.runs)
        for problem in reading.problems:
            print(problem, file=sys.stderr)
        if not reading.runs:
            raise UsageError("nothing to show: no run could be read.")
        logged = [run.series for run in reading.runs]
        names = logged_names(logged)
        if arguments.metric is not None and arguments.metric not in names:
            raise UsageError(
                f"--metric {arguments.metric}: choose one of the logged values: {', '.join(sorted(names))}"
            )
        quality = arguments.metric or find_quality(logged)
        write_page(arguments.output, make_page(reading, quality, arguments.title))
    unknown = "none of the usual names (give --metric: " + ", ".join(sorted(names)[:9]) + ")" if names else "not logged"
    problems = f", problems: {len(reading.problems)}" if reading.problems else ""
    print(f"{arguments.output}: runs: {len(reading.runs)}, quality: {quality or unknown}{problems}")
    return 1 if reading.unreadable else 0
