"""Builds wheel and sdist, looks into both, and tries the wheel in an environment of its own.

    make release-check

Needs the network, a few minutes, and no package but Python's own. What is built stays in ``dist/``;
all else is made in a folder of its own and removed. The cheap half of release hygiene is in
``test_release.py``, with every other test.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASE = {"torch", "lightning", "torchmetrics"}
IN_SDIST = {
    *(
        "src/lightning_dct/__about__.py",
        "src/lightning_dct/py.typed",
        "tests/test_examples.py",
        "tests/release_check.py",
    ),
    *(
        "conf/train.yaml",
        "experiments/train.py",
        "examples/cli.py",
        "examples/notebook.ipynb",
        "docs/compatibility.md",
    ),
    *(
        "Makefile",
        "constraints.txt",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CITATION.cff",
    ),
    *("CONTRIBUTING.md", "mkdocs.yml"),
}
# Nothing of ours is larger than a picture of the docs.
LARGEST_FILE = 300_000
# What runs leave behind, and what they read; docs have a table of figures.
NOT_IN_SDIST = re.compile(
    r"^(?!/docs/).*\.(ckpt|pt|pth|npy|npz|bin|gz|zip|log|pyc|csv|tsv)$|/(outputs|multirun|lightning_logs|wandb)/"
)

TWO_STEPS = """
import sys, torch, lightning_dct
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

if __name__ == "__main__":
    assert "site-packages" in lightning_dct.__file__, lightning_dct.__file__
    model = BoringModel()
    model.layer = torch.nn.Linear(32, 300)
    trainer = Trainer(
        strategy="dct", accelerator="cpu", devices=2, max_steps=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )
    trainer.fit(model)
    totals = trainer.strategy.traffic.totals
    assert totals.steps == 2 and 0 < totals.bytes_sent < totals.bytes_dense, totals
"""


def main() -> None:
    """Check one thing after the other; the first that is wrong ends it."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    version = re.findall(
        r'__version__ = "(.*)"', (ROOT / "src/lightning_dct/__about__.py").read_text()
    )[0]
    with tempfile.TemporaryDirectory() as folder:
        wheel, sdist = build(Path(folder), version)
        package = check_sdist(sdist)
        metadata = check_wheel(wheel, version, package)
        check_installed(Path(folder), wheel, version, metadata)
    say(f"lightning-dct {version} is ready")


def build(folder: Path, version: str) -> tuple[Path, Path]:
    """Make the sdist, and the wheel from what is in it."""
    python = environment(folder / "building")
    run(python, "-m", "pip", "install", "--quiet", "build")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    run(python, "-m", "build", "--outdir", str(ROOT / "dist"), str(ROOT))
    wheel, sdist = (
        ROOT / "dist" / f"lightning_dct-{version}{end}" for end in ("-py3-none-any.whl", ".tar.gz")
    )
    say(
        f"built {wheel.name} ({wheel.stat().st_size:,} bytes) and {sdist.name}"
        f" ({sdist.stat().st_size:,} bytes)"
    )
    return wheel, sdist


def check_sdist(sdist: Path) -> set[str]:
    """What is needed to test and to run the experiments is there, and no data.

    Gives the package's own files.
    """
    with tarfile.open(sdist) as archive:
        files = {
            member.name.partition("/")[2]: member.size for member in archive if member.isfile()
        }
    missing = IN_SDIST - files.keys()
    unwanted = {
        name
        for name, size in files.items()
        if NOT_IN_SDIST.search(f"/{name}") or size > LARGEST_FILE
    }
    expect(not missing, f"the sdist lacks {missing}")
    expect(not unwanted, f"the sdist holds {unwanted}")
    say(
        f"sdist: {len(files)} files, {sum(files.values()):,} bytes unpacked, the largest"
        f" {max(files.values()):,}"
    )
    return {name.removeprefix("src/") for name in files if name.startswith("src/")}


def check_wheel(wheel: Path, version: str, package: set[str]) -> Message:
    """The package is in it, whole, and nothing else; without extras it wants what the README says.

    Its metadata.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(about))
    strangers = {name.split("/")[0] for name in names} - {
        "lightning_dct",
        f"lightning_dct-{version}.dist-info",
    }
    expect(not strangers, f"the wheel holds {strangers}")
    expect(package <= set(names), f"the wheel lacks {package - set(names)}")
    expect(metadata["Version"] == version, f"the wheel is of version {metadata['Version']}")
    alone = re.findall(r"\]\((?!https:|#)[^)]*\)", str(metadata.get_payload()))
    expect(not alone, f"on an index the README's links {alone} lead nowhere")
    base = {requirement for requirement, extra in requirements(metadata) if extra is None}
    expect(base == BASE, f"without extras the wheel wants {base}")
    say(f"wheel: {len(names)} files; wants {', '.join(sorted(base))}")
    return metadata


def check_installed(folder: Path, wheel: Path, version: str, metadata: Message) -> None:
    """Installed without extras it brings none of theirs, prints its version, imports, and trains
    two steps.
    """
    python = environment(folder / "empty")
    constraints = folder / "constraints.txt"
    constraints.write_text(
        next(line for line in (ROOT / "constraints.txt").read_text().split() if "torch==" in line)
    )
    # As the Makefile does: the CPU build where pip can have it.
    torch = constraints.read_text()
    if run(python, "-m", "pip", "install", "--quiet", f"{torch}+cpu", check=False).returncode:
        run(python, "-m", "pip", "install", "--quiet", torch)
    run(python, "-m", "pip", "install", "--quiet", "--constraint", str(constraints), str(wheel))
    run(python, "-m", "pip", "check")
    listed = run(python, "-m", "pip", "list", "--format=freeze").stdout
    installed = {normal(line.partition("==")[0]) for line in listed.split()}
    extras = {requirement for requirement, extra in requirements(metadata) if extra is not None}
    # What Lightning itself needs may be one of them.
    uninvited = (extras & installed) - BASE
    expect(not uninvited, f"without extras there is {uninvited}")
    command = python.with_name("lightning-dct")
    told = subprocess.run(
        [command, "--version"], capture_output=True, text=True, check=True
    ).stdout.strip()
    expect(told == version, f"`lightning-dct --version` prints {told!r}")
    script = folder / "two_steps.py"
    script.write_text(TWO_STEPS)
    run(python, "-W", "ignore", str(script), cwd=folder)
    say(
        f"installed: {len(installed)} packages in all; `lightning-dct --version`: {told}; 2 steps"
        " on 2 ranks"
    )


def requirements(metadata: Message) -> list[tuple[str, str | None]]:
    """What a package wants: names, each with the extra that asks for it or None."""
    found = []
    for line in metadata.get_all("Requires-Dist", []):
        extra = re.search(r"extra == ['\"]([\w-]+)", line)
        found.append((normal(re.match(r"[\w.-]+", line)[0]), None if extra is None else extra[1]))
    return found


def normal(name: str) -> str:
    """A distribution's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def environment(folder: Path) -> Path:
    """A new virtual environment; its interpreter."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def run(
    *words: object, cwd: Path | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a command; where it fails, end with what it said."""
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(word) for word in words]
    done = subprocess.run(command, cwd=cwd, env=outside, capture_output=True, text=True)
    expect(
        not check or done.returncode == 0,
        f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}",
    )
    return done


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        sys.exit(f"release-check: {otherwise}")


def say(sentence: str) -> None:
    print(f"release-check: {sentence}", flush=True)


if __name__ == "__main__":
    main()
