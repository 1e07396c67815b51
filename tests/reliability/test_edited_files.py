"""Files that were damaged, or changed by somebody who made their checksums fit, are refused on
every rank.

Only the weights in Lightning's file may be edited. Training then continues from them.
"""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from distributed.resuming import AtStart, SaveAndStop, twice_ten_batches
from distributed.training import (
    Module,
    Perceptron,
    State,
    rank,
    trainer_for,
    warnings_of,
    weights_of,
)
from lightning_dct import CheckpointError, DCTStrategy
from lightning_dct.checkpoint.format import state_path

NAME = "model.first.weight"


def attempt(path: Path, *callbacks: Any, ckpt_path: Path | None = None) -> None:
    trainer = trainer_for(strategy(), callbacks=list(callbacks))
    trainer.fit(Module(None, torch.optim.Adam, lr=0.01), twice_ten_batches(), ckpt_path=ckpt_path)


def save(path: Path) -> None:
    attempt(path, SaveAndStop(path.with_name("early.ckpt"), 5, stop=False), SaveAndStop(path, 10))


@pytest.fixture(scope="module")
def whole(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks; beside it is an earlier one of the same run."""
    folder = tmp_path_factory.mktemp("whole")
    ranks(2).run(save, folder / "x.ckpt")
    return Path(folder / "x.ckpt")


def refusals(paths: list[list[Path]]) -> list[tuple[str, str]]:
    """What comes of each attempt to resume, in which every rank has a path."""
    found = []
    for path in paths:
        try:
            attempt(path[rank()], ckpt_path=path[rank()])
            found.append(("nothing", "silent"))
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    return found


def assert_refused(ranks: Any, names: list[str], paths: list[list[Path]], says: str) -> None:
    everyone = ranks(2).run(refusals, paths)
    for name, path, answers in zip(names, paths, zip(*everyone, strict=True), strict=True):
        for own, (kind, message) in zip(path, answers, strict=True):
            assert kind == CheckpointError.__name__, (name, kind, message)
            assert says.format(own) in message, (name, message)


def flip(data: bytearray) -> None:
    """One bit of an exponent, in the middle of the largest part: a weight or Adam's state."""
    data[len(data) // 2 | 3] ^= 0x08


BYTES: dict[str, Callable[[bytearray], Any]] = {
    "a bit": flip,
    "the last byte is missing": lambda data: data.__delitem__(slice(-1, None)),
    "half of it": lambda data: data.__delitem__(slice(len(data) // 2, None)),
    "three bytes are left": lambda data: data.__delitem__(slice(3, None)),
    "nothing is left": lambda data: data.clear(),
    "something before it": lambda data: data.__setitem__(slice(0, 0), b"\xef\xbb\xbf\n"),
    "zeros": lambda data: data.__setitem__(slice(None), bytes(len(data))),
    "text": lambda data: data.__setitem__(slice(None), b"<html>404</html>"),
}


def test_damage_to_lightnings_file(ranks: Any, whole: Path, tmp_path: Path) -> None:
    """Oracle: an error with the file's name on both ranks, whether both read the damaged file or
    one does.
    """
    paths = []
    for number, harm in enumerate(BYTES.values()):
        data = bytearray(whole.read_bytes())
        harm(data)
        path = tmp_path / f"{number}.ckpt"
        path.write_bytes(data)
        shutil.copytree(f"{whole}.dct", f"{path}.dct")
        paths += [[path, path], [whole, path]]
    names = [name for name in BYTES for _ in range(2)]
    everyone = ranks(2).run(refusals, paths)
    for name, path, answers in zip(names, paths, zip(*everyone, strict=True), strict=True):
        for kind, message in answers:
            assert kind == CheckpointError.__name__, (name, kind, message)
            assert any(str(one) in message for one in path), (name, message)


def change(field: str, *keys: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def apply(state: dict[str, Any]) -> None:
        place = state[field]
        for key in keys[:-1]:
            place = place[key]
        if keys:
            place[keys[-1]] = to(place[keys[-1]]) if callable(to) else to
        else:
            state[field] = to(place) if callable(to) else to

    return apply


def a_nan(tensor: Any) -> Any:
    return tensor.flatten().index_fill(0, torch.tensor([0]), math.nan).view(tensor.shape)


def a_bit_more(tensor: Any) -> Any:
    return tensor + 1e-3


def without(key: Any) -> Callable[[Any], Any]:
    return lambda value: {name: entry for name, entry in value.items() if name != key}


ADAM = ("optimizers", 0, "state", 0)
GROUP = ("optimizers", 0, "param_groups", 0)
MEAN = f"mean of {NAME}"
# What other ranks must have alike, or what cannot be: found without a fingerprint, too.
FOUND: dict[str, Callable[[dict[str, Any]], None]] = {
    "a step of 10^11": change("exchange_clocks", "steps of 0", to=10**11),
    "one step more": change("exchange_clocks", "steps of 0", to=11),
    "no step": change("exchange_clocks", to=without("steps of 0")),
    "due far ahead": change("exchange_clocks", f"due in 0 {NAME}", to=10**11),
    "a clock of nothing": change("exchange_clocks", to=lambda clocks: {**clocks, "due": 3}),
    "a negative clock": change("exchange_clocks", "steps of 0", to=-1),
    "another step": change("synchronisations", to=11),
    "NaN in flight": change("in_flight", MEAN, to=a_nan),
    "integers in flight": change("in_flight", MEAN, to=lambda mean: mean.long()),
    "other means in flight": change("in_flight", MEAN, to=a_bit_more),
    "too short in flight": change("in_flight", MEAN, to=lambda mean: mean[1:]),
    "half of it in flight": change("in_flight", to=without(f"own of {NAME}")),
    "nothing in flight": change("in_flight", to={}),
    "no optimizers' states": change("optimizers", to=[{}]),
    "an optimizer without groups": change("optimizers", 0, "param_groups", to=[]),
    "text for a moment": change(*ADAM, to="text"),
    "a NaN threshold": change(
        "thresholds", "values", to=lambda values: dict.fromkeys(values, math.nan)
    ),
    "no weights": change("weights", to={}),
    "other shapes": change("weights", NAME, to=lambda weights: weights.T),
    "modules that are a list": change("modules", to=[]),
}
# What only the fingerprint finds: any other rank may have it.
CHANGED: dict[str, Callable[[dict[str, Any]], None]] = {
    "a NaN weight": change("weights", NAME, to=a_nan),
    "an infinite weight": change("weights", NAME, to=lambda weights: weights + math.inf),
    "other weights": change("weights", NAME, to=a_bit_more),
    "a missing weight": change("weights", to=without(NAME)),
    "half precision": change("weights", NAME, to=lambda weights: weights.half()),
    "an infinite moment": change(*ADAM, "exp_avg_sq", to=lambda moment: moment + math.inf),
    "a NaN moment": change(*ADAM, "exp_avg", to=a_nan),
    "a moment of another shape": change(*ADAM, "exp_avg", to=torch.zeros(3)),
    "a step of Adam": change(*ADAM, "step", to=torch.tensor(1e9)),
    "a NaN rate": change(*GROUP, "lr", to=math.nan),
    "another rate": change(*GROUP, "lr", to=1e3),
    "other betas": change(*GROUP, "betas", to=(2.0, 2.0)),
    "an empty optimizer": change("optimizers", 0, "state", to={}),
    "no optimizer": change("optimizers", to=[]),
    "a huge threshold": change(
        "thresholds", "values", to=lambda values: dict.fromkeys(values, 1e38)
    ),
    "no thresholds": change("thresholds", to={"values": {}, "targets": {}}),
    "other targets": change("thresholds", "targets", to=lambda targets: dict.fromkeys(targets, 1)),
    "own in flight": change("in_flight", f"own of {NAME}", to=a_bit_more),
    "an old refresh": change("steps_since_refresh", to=3),
    "gradients": change("accumulated", to=lambda _: {NAME: torch.ones(24, 40)}),
}


@pytest.mark.parametrize(
    ("edits", "known"), [({**FOUND, **CHANGED}, True), (FOUND, False)], ids=["known", "unknown"]
)
def test_edited_states(
    ranks: Any, whole: Path, tmp_path: Path, edits: dict[str, Any], known: bool
) -> None:
    """Oracle: one kind of error on both ranks, for each change of one rank's file; none hangs, none
    is silent.

    An unknown fingerprint is that of a ``CheckpointIO`` of the user's.
    """
    paths = []
    for number, edit in enumerate(edits.values()):
        path = tmp_path / f"{number}.ckpt"
        shutil.copytree(f"{whole}.dct", f"{path}.dct")
        checkpoint = torch.load(whole, weights_only=True)
        manifest = checkpoint["lightning_dct"]
        if not known:
            del manifest["fingerprints"], manifest["checksum"]
        torch.save(checkpoint, path)
        file = state_path(str(path), manifest, 1)
        state = torch.load(file, weights_only=True)
        edit(state)
        torch.save(state, file)
        paths.append([path, path])
    assert_refused(ranks, list(edits), paths, "{}")


NOTES: dict[str, Callable[[dict[str, Any]], None]] = {
    "two stages": lambda manifest: manifest.update(stages=2),
    "no state": lambda manifest: manifest.update(has_state=0),
    "rows": lambda manifest: manifest.update(has_rows=1),
    "one rank": lambda manifest: manifest.update(
        world_size=1, fingerprints=manifest["fingerprints"][:1]
    ),
    "another file": lambda manifest: manifest.update(fingerprints=manifest["fingerprints"][::-1]),
    "a short list": lambda manifest: manifest.update(fingerprints=["a"]),
}


def test_edited_notes(ranks: Any, whole: Path, tmp_path: Path) -> None:
    """Oracle: an error that names the file, where the changed manifest would do: of it, files would
    be found and read.
    """
    paths = []
    for number, edit in enumerate(NOTES.values()):
        path = tmp_path / f"{number}.ckpt"
        shutil.copytree(f"{whole}.dct", f"{path}.dct")
        checkpoint = torch.load(whole, weights_only=True)
        edit(checkpoint["lightning_dct"])
        torch.save(checkpoint, path)
        paths.append([path, path])
    assert_refused(ranks, list(NOTES), paths, "{}")


def test_other_files_of_one_checkpoint(ranks: Any, whole: Path, tmp_path: Path) -> None:
    """Oracle: an error on both ranks; on one of them, somebody has changed a weight in Lightning's
    file.
    """
    path = tmp_path / "x.ckpt"
    shutil.copytree(f"{whole}.dct", f"{path}.dct")
    checkpoint = torch.load(whole, weights_only=True)
    checkpoint["state_dict"][NAME] += 1.0
    torch.save(checkpoint, path)
    assert_refused(ranks, ["another"], [[whole, path]], "they disagree on its field checksum")


def test_whole_files_of_others(ranks: Any, whole: Path, tmp_path: Path) -> None:
    """Oracle: an error on both ranks, for files of two ranks in each other's place; for one of an
    older step; and where one rank has an older checkpoint, as on a host with a stale disk.
    """
    paths = [tmp_path / f"{number}.ckpt" for number in range(2)]
    early = whole.with_name("early.ckpt")
    for path in paths:
        shutil.copy(whole, path)
        shutil.copytree(f"{whole}.dct", f"{path}.dct")
    (first, second), (_, file) = (files_of(path) for path in paths)
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    shutil.copy(files_of(early)[1], file)
    assert_refused(
        ranks,
        ["swapped"],
        [[paths[0]] * 2],
        "is another rank's or another save's: its field 'rank' is ",
    )
    assert_refused(
        ranks,
        ["older"],
        [[paths[1]] * 2],
        f"The file {str(file)!r} is another rank's or another save's",
    )
    disagree = (
        "they disagree on its field lightning_dct['synchronisations'] (rank 0: 5, rank 1: 10)"
    )
    assert_refused(ranks, ["stale"], [[early, whole]], disagree)


def files_of(path: Path) -> list[Path]:
    manifest = torch.load(path, weights_only=True)["lightning_dct"]
    return [Path(state_path(str(path), manifest, of)) for of in range(2)]


class EditsOnLoading(Module):
    """Adds one to a weight of the checkpoint that it loads."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"][NAME] += 1.0


def strategy() -> DCTStrategy:
    """Saved after step 10, the exchange after that step is in flight."""
    return DCTStrategy(density=0.2, local_steps=5, warmup_steps=0, overlap_steps=4)


def stand_still(trainer: Trainer) -> None:
    """Keep the optimizer from moving any weight."""
    trainer.optimizers[0].param_groups[0]["lr"] = 0.0


def rate_and_moments(trainer: Trainer) -> tuple[float, list[float]]:
    (optimizer,) = trainer.optimizers
    return optimizer.param_groups[0]["lr"], [
        float(state["exp_avg"].sum()) for state in optimizer.state.values()
    ]


def resume_without_moving(path: Path, kind: type[Module]) -> tuple[State, list[str]]:
    trainer = trainer_for(strategy(), callbacks=[AtStart(stand_still)], max_epochs=3)
    module = kind(None, torch.optim.Adam, lr=0.01)
    warned = warnings_of(trainer.fit, module, twice_ten_batches(), ckpt_path=path)
    return weights_of(module), [one for one in warned if "Unsent changes of th" in one]


class Renamed(Perceptron):
    """Its gain has another name."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self._parameters.pop("gain")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scale * self.second(torch.tanh(self.first(inputs)))


class RenamesOnLoading(Module):
    """Loads a checkpoint from before the renaming."""

    def __init__(self, _: None, *given: Any, **settings: Any) -> None:
        super().__init__(Renamed(), *given, **settings)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["model.scale"] = checkpoint["state_dict"].pop("model.gain")


class EditsTheRate(Module):
    """Continues at another learning rate than the one that was saved."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] = 0.125


def resume_optimizer(path: Path, kind: type[Module]) -> tuple[float, list[float], list[str]]:
    trainer = trainer_for(
        strategy(), callbacks=[resumed := AtStart(rate_and_moments)], max_epochs=3
    )
    warned = warnings_of(
        trainer.fit, kind(None, torch.optim.Adam, lr=0.01), twice_ten_batches(), ckpt_path=path
    )
    return *resumed.seen, [one for one in warned if "hyperparameters" in one]


def test_an_edited_learning_rate_stays(ranks: Any, whole: Path) -> None:
    """Oracle: without the edit, the same moments, which differ between ranks, and no warning."""
    plain, edited = (ranks(2).run(resume_optimizer, whole, kind) for kind in (Module, EditsTheRate))
    assert [rate for rate, *_ in plain] == [0.01] * 2
    assert [rate for rate, *_ in edited] == [0.125] * 2
    assert [moments for _, moments, _ in plain] == [moments for _, moments, _ in edited]
    assert plain[0][1] != plain[1][1]
    assert plain[0][2] == []
    assert len(edited[0][2]) == 1


@pytest.mark.parametrize("kind", [Module, EditsOnLoading])
@pytest.mark.parametrize("world_size", [1, 2])
def test_edited_weights_stay(
    ranks: Any, whole: Path, tmp_path: Path, world_size: int, kind: type[Module]
) -> None:
    """A weight is edited in the file, or by a hook; then nothing moves but what the ranks send.

    Oracle: the edited weight and the update in flight, if the ranks are as many as before; of the
    other weights those of a run without the edit; a warning with the name of the edited one.
    """
    path = tmp_path / "x.ckpt"
    shutil.copytree(f"{whole}.dct", f"{path}.dct")
    checkpoint = torch.load(whole, weights_only=True)
    expected = checkpoint["state_dict"][NAME] + 1.0
    state = torch.load(state_path(str(whole), checkpoint["lightning_dct"], 0), weights_only=True)
    if world_size == 2:
        expected = expected + state["in_flight"][f"mean of {NAME}"].view(expected.shape)
    if kind is Module:
        checkpoint["state_dict"][NAME] += 1.0
    torch.save(checkpoint, path)
    without_edit, none = ranks(world_size).run(resume_without_moving, whole, Module)[0]
    weights, (warned,) = ranks(world_size).run(resume_without_moving, path, kind)[0]
    assert none == []
    assert NAME in warned
    assert "differ from the weights that were saved" in warned
    for name, weight in weights.items():
        torch.testing.assert_close(
            weight, expected if name == NAME else without_edit[name], rtol=0, atol=1e-6
        )


def test_renamed_parameters_are_told(ranks: Any, whole: Path) -> None:
    """Oracle: the shared weights in the file."""
    saved = torch.load(whole, weights_only=True)["state_dict"]["model.gain"]
    weights, (warned,) = ranks(2).run(resume_without_moving, whole, RenamesOnLoading)[0]
    assert (
        "states of ['model.gain'], which this model does not train, and none of ['model.scale']"
        in warned
    )
    torch.testing.assert_close(weights["model.scale"], saved, rtol=0, atol=0)
