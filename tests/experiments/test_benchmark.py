"""The benchmark on the loopback, a few steps long: that it measures what it says, never how long
anything takes.
"""

import gc
import json
import math
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmark import job, kernels, memory, pipeline, recommender, steps
from benchmark.job import Job, Run, of_all_ranks, run_job
from benchmark.kernels import ROOFLINE, WARM_UP_ROUNDS, Timed, tabulate_profiles, time_in_turn
from benchmark.session import in_order
from benchmark.stages import FP32, OURS
from benchmark.synchronisations import DDP, NOTHING, SYNCHRONISATIONS
from benchmark.tables import (
    Figure,
    Take,
    faster_than,
    figure_of,
    link_name,
    step_ms,
    tabulate,
    times,
)
from benchmark.timeline import BACKWARD, FORWARD, SHARING, WAITING, typical_step
from benchmark.worker import train
from distributed.harness import Ranks
from distributed.scripts import run_here
from distributed.training import on_two_nodes
from network.hosts import INTERFACE, Host, Link, make_hosts
from reliability.processes import run_to_the_end

RUN = Run(DDP, 10, 2.0, 8000, 9000, 0.5, 0.1, [3.0, 2.0], None)


@pytest.fixture
def settings_of_the_process() -> Iterator[None]:
    """Puts back what the commands change in the process they run in."""
    threads = torch.get_num_threads()
    handler = signal.getsignal(signal.SIGTERM)
    yield
    torch.set_num_threads(threads)
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.usefixtures("settings_of_the_process", "quick_python")
def test_steps_on_the_loopback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: what DDP sends is known from the model's size; all start from the same loss."""
    settings = [
        "--rounds",
        "1",
        "--steps",
        "2",
        "--quality-steps",
        "0",
        "--width",
        "16",
        "--batch-size",
        "8",
    ]
    assert (
        steps.main(["--loopback", *settings, "--only", "1%, 1 bit", "--output", str(tmp_path)]) == 0
    )
    output = " ".join(capsys.readouterr().out.split())
    assert "on the loopback interface, because --loopback was given" in output
    report = json.loads((tmp_path / "steps.json").read_text())
    runs = {one["synchronisation"]: one for one in report["runs"]}
    assert set(runs) == {NOTHING, DDP, "DCT, 1%, 1 bit"}
    parameters = (2048 + 1) * 16 + (16 + 1) * 16 + (16 + 1) * 512
    assert runs[DDP]["counted_bytes"] == 2 * 4 * parameters
    assert runs[NOTHING]["counted_bytes"] == 0
    assert 0 < runs["DCT, 1%, 1 bit"]["counted_bytes"] < runs[DDP]["counted_bytes"] / 50
    assert {(one["steps"], one["interface_bytes"], one["score"]) for one in runs.values()} == {
        (2, None, None)
    }
    assert len({one["losses"][0] for one in runs.values()}) == 1
    assert (tmp_path / "steps.png").stat().st_size > 0
    # Heads, a rule, and a row each.
    assert (tmp_path / "steps.md").read_text().count("\n| ") == 5


def remember(name: str) -> dict[str, int]:
    with on_two_nodes():
        return memory.train(name, layers=2, width=16)


@pytest.mark.parametrize(("name", "share"), [("hsdp", 0), ("dct_fsdp, updates", 1 / 2)])
def test_memory_of_a_rank(ranks: Callable[[int], Ranks], name: str, share: float) -> None:
    """Oracle: the shared weights of half the model."""
    for found in ranks(4).run(remember, name):
        assert found["remembered"] == share * 4 * 2 * (16 * 16 + 16)
        assert found["peak"] >= 0


def train_and_score() -> Run:
    warnings.simplefilter("ignore")
    run = train("DCT, 1%, 1 bit", Job(["DCT, 1%, 1 bit"], 1, 3, None, True, 8, 16))
    gc.collect()
    return run


def test_a_scored_run_tells_its_losses(ranks: Callable[[int], Ranks]) -> None:
    """Oracle: guesses of a network that has learnt nothing cost the logarithm of 256, which is
    5.55.
    """
    mine, others = ranks(2).run(train_and_score)
    assert mine.steps == 3
    assert len(mine.losses) == 4
    assert mine.losses[0] == pytest.approx(math.log(256), abs=0.1)
    assert mine.score == others.score
    assert 0 < mine.score < mine.losses[0]
    assert mine.counted_bytes == others.counted_bytes > 0


@pytest.mark.usefixtures("settings_of_the_process")
def test_kernels_are_timed(tmp_path: Path) -> None:
    kernels.main(
        [
            "--entries",
            "20000",
            "--rounds",
            "1",
            "--threads",
            "1",
            "--density",
            "0.3",
            "--output",
            str(tmp_path),
        ]
    )
    report = json.loads((tmp_path / "kernels.json").read_text())
    names = [one["name"] for one in report["timed"]]
    assert {ROOFLINE, "exchange: torch", "exchange: numba", "  flag and gather"} <= set(names)
    assert all(len(one["nanoseconds"]) == 1 for one in report["timed"])


def test_hosts_get_the_rate_that_is_asked_for() -> None:
    """Oracle: what tc says of both ends of each link."""
    try:
        with make_hosts(2, 50) as hosts:
            for host in hosts:
                inside = tc("-netns", host.namespace, "qdisc", "show", "dev", INTERFACE)
                outside = tc("qdisc", "show", "dev", host.namespace.replace("-", "p"))
                assert "tbf" in inside
                assert "rate 50Mbit" in inside
                assert "rate 50Mbit" in outside
    except RuntimeError as error:
        pytest.skip(str(error))


def tc(*words: str) -> str:
    return subprocess.run(["tc", *words], capture_output=True, text=True, check=True).stdout


def test_ratios_are_taken_within_a_round() -> None:
    """The second round was twice as slow for all: the ratio stays."""
    runs = [
        replace(
            RUN, synchronisation=name, seconds=seconds * factor, interface_bytes=sent, round=round
        )
        for name, seconds, sent in (
            (NOTHING, 1.0, 10),
            (DDP, 4.0, 40_000),
            ("DCT, 1%, 1 bit", 2.0, 400),
        )
        for round, factor in ((0, 1.0), (1, 2.0), (2, 1.0))
    ]

    def found(name: str, take: Take) -> Figure | None:
        return figure_of(runs, name, Link(), take)

    ours = "DCT, 1%, 1 bit"
    assert found(ours, times(NOTHING)) == Figure(2.0, 2.0, 2.0)
    assert found(ours, faster_than(DDP)) == Figure(2.0, 2.0, 2.0)
    assert found(ours, steps.fewer_than_ddp) == Figure(100.0, 100.0, 100.0)
    assert found(ours, step_ms) == Figure(200.0, 200.0, 400.0)
    # Nothing is sent without synchronisation, so there is no ratio of bytes.
    runs = [replace(one, counted_bytes=0) for one in runs]
    assert found(NOTHING, steps.fewer_than_ddp) is None
    assert found("PowerSGD, rank 1", step_ms) is None


def test_the_slowest_rank_counts() -> None:
    ranks = [RUN, replace(RUN, seconds=3.0, interface_bytes=9500, compressing_seconds=0.4)]
    together = of_all_ranks(ranks, Link(100), 2)
    assert together == replace(RUN, seconds=3.0, interface_bytes=9500, megabits=100, round=2)
    with patch.object(job, "run_ranks"), pytest.raises(FileNotFoundError, match=r"rank0\.json"):
        run_job([Host()], "script.py", {})


def test_rounds_differ_in_their_order_only() -> None:
    names = list(SYNCHRONISATIONS)
    orders = [in_order(names, round) for round in range(3)]
    assert all(sorted(order) == sorted(names) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert in_order(names, 1) == orders[1]


def test_a_table_has_three_columns_for_each_kind_of_link() -> None:
    runs = [
        replace(RUN, synchronisation=name, megabits=rate)
        for name in (DDP, NOTHING)
        for rate in (1000, 100)
    ]
    columns = steps.columns_of(runs)
    assert columns[0].head == "ms a step, 1 Gbit/s"
    assert columns[3].head == "ms a step, 100 Mbit/s"
    names = steps.names_in(runs)
    assert names == [NOTHING, DDP]
    assert tabulate("", runs, names, columns)[2] == [
        DDP,
        "200",
        "1.00x",
        "1.0x",
        "200",
        "1.00x",
        "1.0x",
        "0.9",
        "+12.5%",
        "1.0x",
        "50.0",
    ]
    assert link_name(Link()) == "no limit"


@pytest.mark.usefixtures("settings_of_the_process")
def test_actions_are_timed_in_turn() -> None:
    calls: list[str] = []
    actions = {name: lambda name=name: calls.append(name) for name in ("one", "two")}
    seconds = time_in_turn(actions, 2, lambda: calls.append("reset"))
    assert calls == ["reset", "one", "reset", "two"] * (WARM_UP_ROUNDS + 2)
    assert {name: len(times) for name, times in seconds.items()} == {"one": 2, "two": 2}


def test_times_are_set_beside_the_roofline_of_as_many_threads() -> None:
    timed = [
        Timed(ROOFLINE, 10**6, 0.1, 1, [4.0]),
        Timed("x", 10**6, 0.1, 1, [6.0, 8.0, 20.0]),
        Timed(ROOFLINE, 10**6, 0.1, 2, [2.0]),
        Timed("x", 10**6, 0.1, 2, [6.0]),
    ]
    heads, _, row = tabulate_profiles(timed)
    assert heads[1:] == ["1 M, 10%, 1 thread", "1 M, 10%, 2 threads"]
    assert row == ["x", "8.00 (2.0x)", "6.00 (3.0x)"]


@pytest.mark.parametrize("options", [["--hosts", "1"], ["--links", "0"], ["--rounds", "0"]])
def test_bad_options_are_named(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        steps.parse_options(options)
    assert "argument {}: {}: give ".format(*options) in capsys.readouterr().err


def run_node(script: str, arguments: tuple[str, ...], folder: str) -> None:
    """What torchrun does for the only rank of one of two hosts."""
    with on_two_nodes():
        run_here(
            script,
            arguments,
            folder,
            LOCAL_WORLD_SIZE="1",
            OMP_NUM_THREADS="1",
            NUMBA_NUM_THREADS="1",
        )


@pytest.fixture
def hosts_that_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks come from the fork server, at little cost: test_steps_on_the_loopback shows that
    torchrun starts them.
    """

    def run_ranks(hosts: list[Any], words: list[str], *_: int) -> None:
        arguments = (words[0], tuple(words[1:]), str(tmp_path))
        for ended in run_to_the_end(
            run_node, *arguments, world_size=2, failing=-1, folder=tmp_path, timeout_s=400
        ):
            assert ended.exit_status == 0, ended.output

    monkeypatch.setattr(job, "run_ranks", run_ranks)


@pytest.mark.usefixtures("settings_of_the_process", "hosts_that_fork")
def test_a_recommender_on_the_loopback(tmp_path: Path) -> None:
    """Oracle: 13 tables are another rank's, whose ids, rows and gradients cross whole where nothing
    is compressed.
    """
    sizes = [
        "--rounds",
        "1",
        "--steps",
        "2",
        "--batch-size",
        "8",
        "--dim",
        "4",
        "--table-rows",
        "50",
    ]
    only = ["--only", "fp16", "5%"]
    assert recommender.main(["--loopback", *sizes, *only, "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "hosts2-batch8-dim4.json").read_text())
    runs = {run["synchronisation"]: run["parts"] for run in report["runs"]}
    assert set(runs) == {"all-to-all, fp32 rows", "all-to-all, fp16 rows", "changes, 5%, 1 bit"}
    for name, width in (("all-to-all, fp32 rows", 4), ("all-to-all, fp16 rows", 2)):
        looked_up = 2 * 8 * 13
        crossed = [runs[name][part] for part in ("ids", "rows", "gradients")]
        assert crossed == [8 * looked_up, width * 4 * looked_up, width * 4 * looked_up]
    assert 0 < runs["changes, 5%, 1 bit"]["rows"] < runs["all-to-all, fp16 rows"]["rows"]
    assert [run["evicted"] for run in runs.values()] == [0, 0, 0]  # the caches hold all rows


@pytest.mark.usefixtures("settings_of_the_process", "hosts_that_fork")
def test_a_pipeline_on_the_loopback(tmp_path: Path) -> None:
    """Oracle: in fp32 every entry crosses whole, each way, and 12 bytes of a header go forward."""
    sizes = [
        "--rounds",
        "1",
        "--steps",
        "2",
        "--batch-size",
        "4",
        "--micro-batches",
        "2",
        "--width",
        "16",
    ]
    assert (
        pipeline.main(["--loopback", *sizes, "--only", "subspace", "--output", str(tmp_path)]) == 0
    )
    runs = {
        run["synchronisation"]: run
        for run in json.loads((tmp_path / "pipeline.json").read_text())["runs"]
    }
    assert set(runs) == {FP32, OURS}
    micro_batch = 2 * 128 * 16 * 4
    steps = runs[FP32]["steps"]
    assert runs[FP32]["parts"] == {
        "stage 0": steps * 2 * (micro_batch + 12),
        "stage 1": steps * 2 * micro_batch,
    }
    assert (
        0
        < runs[OURS]["parts"]["stage 1"]
        < runs[OURS]["parts"]["stage 0"]
        < runs[FP32]["parts"]["stage 1"] / 8
    )
    for run in runs.values():
        assert run["losses"][0] == pytest.approx(math.log(256), rel=0.1)
        computed = [
            [span for span in spans if span[0] in (FORWARD, BACKWARD)] for spans in run["spans"]
        ]
        for spans in computed:
            assert sorted(span[:2] for span in spans) == [
                [what, part] for what in (BACKWARD, FORWARD) for part in (0, 1)
            ]
        # The second stage needs what the first has computed.
        assert computed[0][0][3] <= computed[1][0][3]
        assert all({WAITING, SHARING} <= {span[0] for span in spans} for spans in run["spans"])
    assert (tmp_path / "timeline-loopback.png").stat().st_size > 0
    assert (tmp_path / "pipeline.md").read_text().count("\n| ") == 4


def test_the_step_of_median_length_is_shown() -> None:
    steps = [
        [(FORWARD, 0, 10.0 * step, 10.0 * step + length)]
        for step, length in enumerate((1.0, 3.0, 2.0))
    ]
    assert typical_step([steps, steps]) == [[(FORWARD, 0, 0.0, 2.0)]] * 2


def test_links_are_read() -> None:
    words = ["none", "1000", "10:50"]
    links = pipeline.parse_options(["--links", *words]).links
    assert [link_name(link) for link in links] == ["no limit", "1 Gbit/s", "10 Mbit/s, 50 ms"]
    for wrong in ("0", "10:-1", "fast"):
        with pytest.raises(SystemExit):
            pipeline.parse_options(["--links", wrong])
