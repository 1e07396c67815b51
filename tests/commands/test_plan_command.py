"""``lightning-dct plan`` from the command line: what it prints, and what it refuses."""

import re
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.demos import LightningTransformer

from lightning_dct import DCTConfig
from lightning_dct.commands import main
from lightning_dct.cost.timing import Speed, measure_speed

SPEED = Speed(compress=1e-9, clear=1e-10, add=1e-11, measurement="made up")
ASKED = ["--world-size", "4", "--link", "1Gbit", "--parameters", "1M"]


@pytest.fixture(autouse=True)
def made_up_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dct.commands.measure_speed", lambda *_: SPEED)


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    printed = plan(capsys, *ASKED, "--local-steps", "8", "--density", "0.3")
    assert (
        "30% of the entries, 1bit values, updates every 8 steps; 4 ranks on 4 nodes, 1 Gbit/s"
        in printed
    )
    assert "ddp, fp32 all_gather (auto) two_phase" in printed
    # A ring all-reduce: 2 x 3/4 x 4 MB; 48 ms at 1 Gbit/s.
    assert "bytes a step and rank 6,000,000 " in printed
    assert "ms on the link 48.0 " in printed
    # all_gather: 1 ms to compress, 0.1 to clear, 4 x 0.01 to add, once in 8 steps.
    assert "ms compressing 0.0 0.1 " in printed
    assert (
        "exchange=\"auto\" takes 'all_gather': 4 ranks on 4 nodes (every node has one rank only);"
        in printed
    )
    assert "Compressing: made up." in printed
    assert "extra memory on a rank 0 B 4.00 MB 5.00 MB" in printed
    assert "hierarchical" not in printed


def test_buffers_have_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    """Two statistics of 8 numbers, averaged by 4 ranks, and a count of 8 bytes, once in 2 steps;
    DDP sends all.
    """
    words = (
        "--world-size 4 --link 1Gbit --module torch.nn:BatchNorm1d --arguments num_features=8"
        " --local-steps 2"
    )
    assert "bytes of buffers, at most 72 52 52 " in plan(capsys, *words.split())
    assert "buffers" not in plan(capsys, *ASKED)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        # What four ranks need by the law: 7,000 steps for one at 3%, 14,000 for one at 1.5%, 21,000
        # for four at 10%.
        (
            (),
            (
                "A run of 10,000 optimizer steps: 1,000,000 parameters in 1 tensor, 3% of the"
                " entries, 1bit"
            ),
        ),
        (("--steps", "14000"), "1.5% of the entries, 1bit values, updates every step;"),
        (("--steps", "100"), "30% of the entries, 1bit values, updates every step;"),
        (
            ("--steps", "21000", "--density", "0.1"),
            "10% of the entries, 1bit values, updates every 4 steps;",
        ),
    ],
)
def test_a_longer_run_needs_fewer_bytes(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    assert told in plan(capsys, *ASKED, *words)


@pytest.mark.parametrize("installed", [True, False])
def test_a_missing_kernel_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    monkeypatch.setattr(
        "lightning_dct.kernels._numba_error", lambda: None if installed else ImportError("none")
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert ("`pip install numba`" in plan(capsys, *ASKED)) != installed


def test_several_ranks_on_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    printed = plan(capsys, *ASKED, "--nodes", "2", "--density", "0.1")
    assert "of them to other nodes 3,000,000 " in printed
    assert "hierarchical" in printed
    assert "The ranks of a node share its link" in printed


def test_a_module_of_real_tensor_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--world-size",
        "2",
        "--link",
        "1Gbit",
        "--module",
        "lightning.pytorch.demos:LightningTransformer",
    ]
    printed = plan(capsys, *words, "--arguments", "vocab_size=1000")
    sizes = [parameter.numel() for parameter in LightningTransformer(1000).parameters()]
    assert f" {sum(sizes):,} parameters in {len(sizes)} tensors" in printed


def test_a_link_faster_than_compressing(capsys: pytest.CaptureFixture[str]) -> None:
    """Below the rate that it names, the verdict is the other one."""
    asked = ("--world-size", "4", "--parameters", "1M", "--link")
    printed = plan(capsys, *asked, "400Gbit")
    assert "On this link the dense all-reduce is faster" in printed
    rate = re.search(r"Compressing pays on links below about ([\d.]+) (.)bit/s", printed)
    assert "Synchronising takes" in plan(capsys, *asked, f"{0.9 * float(rate[1]):.3f}{rate[2]}bit")


def test_a_run_that_is_too_short_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "This run is short for local_steps=1, density=0.3" in plan(
        capsys, *ASKED, "--steps", "100"
    )
    assert "This run is short" not in plan(capsys, *ASKED, "--steps", "20k")


@pytest.mark.parametrize("words", ["--compress gradients --density 1", "--min-tensor-size 1000001"])
def test_the_dense_exchange_is_not_said_to_be_faster_than_itself(
    capsys: pytest.CaptureFixture[str], words: str
) -> None:
    """Whole updates carry a tag of 8 bytes."""
    printed = plan(capsys, *ASKED, *words.split())
    assert (
        "Nothing is compressed, and it sends no less than the dense all-reduce: use strategy='ddp'."
        in printed
    )
    assert "links below" not in printed


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--density", "1.5"], r"`density` .* must be in \(0, 1\].* To send everything use 1.0"),
        (["--density", "0"], r"`density` .* must be in \(0, 1\]"),
        (["--value-format", "int3"], "--value-format: invalid choice: 'int3' .*'1bit'"),
        (["--link", "1000"], "--link: '1000': write a number above 0 and its unit, as 1Gbit"),
        (["--link", "1.2.3Gbit"], "--link: '1.2.3Gbit'"),
        (["--link", "1e400Gbit"], "--link: '1e400Gbit'"),
        (["--link", "1e308GB"], "--link: '1e308GB'"),
        (["--parameters", "1e400"], "--parameters: '1e400': .* 1e\\+15 at most"),
        (["--parameters", "1e30"], "--parameters: '1e30': .* 1e\\+15 at most"),
        (
            ["--world-size", "100000000"],
            "`--world-size 100000000`: plans are made for 10,000 ranks at most",
        ),
        (["--parameters", "many"], "--parameters: 'many': .* 100M"),
        (["--nodes", "3"], "`--nodes 3` does not divide `--world-size 4`.* Give 1, 2 or 4"),
        (["--world-size", "1"], "`--world-size 1`: .* Give 2 or more"),
        (["--arguments", "a=1"], "`--arguments` are for the constructor of a `--module`"),
        (["--min-tensor-size", "-1"], "`min_tensor_size` must be at least 0"),
        (["--module", "nosuch:A"], "not allowed with argument --parameters"),
        (["--steps", "0"], "--steps: '0': write a whole number from 1 on"),
        (["--steps", "-5"], "--steps: '-5': write a whole number from 1 on"),
        (["--steps", "1.5"], "--steps: '1.5': write a whole number from 1 on"),
        (["--compress", "gradients", "--local-steps", "4"], "; got local_steps=4. Leave that out"),
    ],
)
def test_misuse(capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    assert re.search(told, misuse(capsys, *ASKED, *words))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["nosuch:A"],
            "`--module nosuch:A` cannot be made: ModuleNotFoundError.* package.module:Class",
        ),
        (["torch.nn:Lin"], "`--module torch.nn:Lin` cannot be made: .*'Lin'"),
        (
            ["torch.nn:Linear"],
            r"`--module torch.nn:Linear` cannot be made: TypeError.*in_features.*`--arguments ",
        ),
        (["torch.nn:Linear", "--arguments", "3"], "`--arguments 3`: write KEY=VALUE pairs"),
        (
            ["torch.nn:LazyLinear", "--arguments", "out_features=3"],
            "size of parameter 'weight' is not known",
        ),
        (["torch.nn:ReLU"], "ReLU has no parameter whose gradient is synchronised"),
        (["made_up_modules:Empty"], "Empty has no parameter whose gradient is synchronised"),
        (
            ["made_up_modules:nothing"],
            "`--module made_up_modules:nothing` must give a torch.nn.Module, not list",
        ),
        *(
            (
                [path, "--arguments", f"{first}=touch called"],
                "neither a class of torch.nn.Module nor a function in a",
            )
            for path, first in (
                ("os:system", "command"),
                ("subprocess:getoutput", "cmd"),
                ("subprocess:Popen", "args"),
            )
        ),
        (
            ["lightning.fabric:seed_everything", "--arguments", "seed=3"],
            "neither a class of torch.nn.Module nor a",
        ),
    ],
)
def test_misuse_of_modules(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    told: str,
) -> None:
    (tmp_path / "made_up_modules.py").write_text(
        "from torch import nn, zeros\n\ndef nothing():\n    return []\n\nclass Empty(nn.Module):\n "
        "   def __init__(self):\n        super().__init__()\n        self.a ="
        " nn.Parameter(zeros(0))\n        self.frozen = nn.Parameter(zeros(9),"
        " requires_grad=False)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    assert re.search(told, misuse(capsys, *ASKED[:-2], "--module", *words))
    assert not (tmp_path / "called").exists()


def test_misuse_of_what_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert "arguments are required: --world-size, --link" in misuse(capsys, "--parameters", "1M")


def misuse(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    try:
        status = main(["plan", *words])
    except SystemExit as left:
        status = left.code
    assert status == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("density", "sizes"), [(0.05, [20_000]), (0.2, [300, 10, 5000])])
def test_speed_is_measured_with_small_tensors_whole(density: float, sizes: list[int]) -> None:
    speed = measure_speed(
        DCTConfig(density=density, min_tensor_size=128), sizes, 0.0, torch.device("cpu")
    )
    assert speed.compress > 0
    assert min(speed.clear, speed.add) >= 0
    assert f"{sum(sizes):,} entries" in speed.measurement


def test_what_is_sent_whole_takes_no_time_to_compress() -> None:
    dense = measure_speed(DCTConfig(density=1.0), [20_000], 0.0, torch.device("cpu"))
    assert dense.seconds("all_gather", 20_000, 2, 1) == 0


def test_what_an_exchange_costs() -> None:
    """By hand, for 1,000 entries on 8 ranks, 4 a node; compressing costs 100 an entry, clearing 10,
    adding 1.
    """
    speed = Speed(100.0, 10.0, 1.0, "")
    assert speed.seconds("all_gather", 1000, 8, 1) == 1000 * (100 + 10 + 8)
    assert speed.seconds("two_phase", 1000, 8, 1) == 1000 * (100 + 10 + 1) + 125 * (100 + 10 + 8)
    assert speed.seconds("hierarchical", 1000, 8, 4) == 250 * 100 + 1000 * (10 + 2)


def test_tables_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the formula of docs/recommender.md, by hand."""
    assert (
        main(
            [
                "plan",
                "--world-size",
                "4",
                "--link",
                "1Gbit",
                "--tables",
                "2M",
                "400k",
                "--dim",
                "16",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    own = 600_000
    room = 2 * own * 64 // (12 * 16 + 196)
    assert f"own rows                               {own:,}  38.40 MB" in printed
    assert f"(cache_rows={room})" in printed
    assert "2.00 times the own rows" in printed
    main(
        [
            "plan",
            "--world-size",
            "4",
            "--link",
            "1Gbit",
            "--tables",
            "2M",
            "--cache-rows",
            "5000000",
        ]
    )
    assert "(cache_rows=1500000)" in capsys.readouterr().out  # there are no more rows of others
