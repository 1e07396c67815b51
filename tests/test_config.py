import pickle
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, replace
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lightning_dct import DCTConfig
from lightning_dct.config import VALUE_FORMATS
from lightning_dct.warmup import WARMUP_STAGES
from strategies_for_hypothesis import examples

NAMES = ["embedding.weight", "layers.0.linear.weight", "layers.0.linear.bias"]


@pytest.mark.parametrize(
    ("setting", "value", "error"),
    [
        ("density", 0, ValueError),
        ("density", 0.0, ValueError),
        ("density", -0.1, ValueError),
        ("density", 2, ValueError),
        ("density", 1.0000001, ValueError),
        ("density", float("nan"), ValueError),
        ("density", float("inf"), ValueError),
        ("density", "x", TypeError),
        ("density", "0.01", TypeError),
        ("density", None, TypeError),
        ("density", True, TypeError),
        ("density", [0.1], TypeError),
        ("density_per_parameter", [("a", 0.1)], TypeError),
        ("density_per_parameter", 0.1, TypeError),
        ("density_per_parameter", "*.weight", TypeError),
        ("density_per_parameter", None, TypeError),
        ("refresh_every", 0, ValueError),
        ("refresh_every", -5, ValueError),
        ("refresh_every", 10.0, TypeError),
        ("refresh_every", "1000", TypeError),
        ("refresh_every", True, TypeError),
        ("refresh_every", None, TypeError),
        ("warmup_steps", -1, ValueError),
        ("warmup_steps", 1.5, TypeError),
        ("warmup_steps", False, TypeError),
        ("warmup_schedule", "cosine", ValueError),
        ("warmup_schedule", None, ValueError),
        ("value_format", "fp16", ValueError),
        ("value_format", "BF16", ValueError),
        ("value_format", 16, ValueError),
        ("min_tensor_size", -1, ValueError),
        ("min_tensor_size", 0.5, TypeError),
        ("min_tensor_size", "many", TypeError),
        ("exchange", "ring", ValueError),
        ("kernel", "cuda", ValueError),
        ("kernel", None, ValueError),
        ("guard", 1, TypeError),
        ("guard", "yes", TypeError),
        ("guard", None, TypeError),
    ],
)
def test_bad_settings_are_named(setting: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"`{setting}`") as raised:
        DCTConfig(**{setting: value})
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize(("density", "error"), [(0, ValueError), (1.5, ValueError), ("x", TypeError)])
def test_bad_densities_of_parameters_name_their_pattern(density: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"`density_per_parameter\['\*\.bias'\]`"):
        DCTConfig(density_per_parameter={"*.weight": 0.1, "*.bias": density})


@pytest.mark.parametrize(
    "settings",
    [
        {"density": 1},
        {"density": 1.0},
        {"density": 1e-9},
        {"refresh_every": 1},
        {"warmup_steps": 0},
        {"min_tensor_size": 0},
        {"guard": False},
        *({"value_format": name} for name in ("fp32", "bf16", "int8", "1bit")),
        *({"warmup_schedule": name} for name in ("exponential", "linear")),
    ],
)
def test_good_settings_are_kept(settings: dict[str, Any]) -> None:
    config = DCTConfig(**settings)
    assert {name: getattr(config, name) for name in settings} == settings


def test_the_choices_are_listed() -> None:
    with pytest.raises(ValueError) as raised:
        DCTConfig(value_format="fp8")  # type: ignore[arg-type]
    assert all(repr(name) in str(raised.value) for name in VALUE_FORMATS)


def test_frozen() -> None:
    config = DCTConfig()
    with pytest.raises(FrozenInstanceError):
        config.density = 0.5  # type: ignore[misc]


@pytest.mark.parametrize("mapping", [dict, MappingProxyType, OmegaConf.create], ids=["dict", "proxy", "DictConfig"])
def test_densities_of_parameters_become_a_private_plain_dict(mapping: type[Mapping[str, float]]) -> None:
    given_densities: dict[str, Any] = {"*.embedding.weight": 0.001, "*.bias": 1}
    config = DCTConfig(density_per_parameter=mapping(given_densities))
    given_densities["*.bias"] = 0.5
    assert config.density_per_parameter == {"*.embedding.weight": 0.001, "*.bias": 1.0}
    assert type(config.density_per_parameter) is dict
    assert all(type(density) is float for density in config.density_per_parameter.values())


def test_pickles() -> None:
    config = DCTConfig(density=0.05, density_per_parameter=OmegaConf.create({"a*": 0.5}), value_format="int8")
    assert pickle.loads(pickle.dumps(config)) == config
    assert replace(config, guard=False).density_per_parameter == {"a*": 0.5}


@pytest.mark.parametrize("schedule", ["exponential", "linear"])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.3, 1.0])
def test_density_at_the_ends_of_warmup_is_exact(schedule: Any, density: float) -> None:
    config = DCTConfig(density=density, warmup_steps=100, warmup_schedule=schedule)
    assert config.density_of("weight", config.warmup_stage(0)) == 1.0
    assert config.density_of("weight", config.warmup_stage(100)) == density
    assert config.density_of("weight") == density


@pytest.mark.parametrize(("schedule", "halfway"), [("exponential", 0.1), ("linear", 0.505)])
def test_density_in_the_middle_of_warmup(schedule: Any, halfway: float) -> None:
    config = DCTConfig(density=0.01, warmup_steps=100, warmup_schedule=schedule)
    assert config.density_of("weight", config.warmup_stage(50)) == pytest.approx(halfway)


@pytest.mark.parametrize("schedule", ["exponential", "linear"])
@pytest.mark.parametrize("warmup_steps", [1, 10, 32, 100, 1000])
def test_density_only_falls(schedule: Any, warmup_steps: int) -> None:
    config = DCTConfig(warmup_steps=warmup_steps, warmup_schedule=schedule)
    densities = [config.density_of("weight", config.warmup_stage(step)) for step in range(warmup_steps + 2)]
    assert densities == sorted(densities, reverse=True)
    assert densities[0] == 1.0
    assert densities[-2] == densities[-1] == config.density_of("weight")


@given(step=st.integers(0, 3000), warmup_steps=st.integers(0, 2000))
@examples(100)
def test_stages_of_warmup(step: int, warmup_steps: int) -> None:
    stage = DCTConfig(warmup_steps=warmup_steps).warmup_stage(step)
    expected = WARMUP_STAGES if step >= warmup_steps else int(WARMUP_STAGES * step / warmup_steps)
    assert stage == expected
    assert 0 <= stage <= WARMUP_STAGES
    assert (stage == WARMUP_STAGES) == (step >= warmup_steps)


def test_no_warmup_starts_at_the_target() -> None:
    config = DCTConfig(density=0.02, warmup_steps=0)
    assert config.density_of("weight", config.warmup_stage(0)) == 0.02


def test_the_first_pattern_that_matches_wins() -> None:
    config = DCTConfig(density_per_parameter={"layers.0.*": 0.2, "*.weight": 0.3, "*": 0.4})
    assert [config.density_of(name) for name in NAMES] == [0.3, 0.2, 0.2]
    assert config.density_of("scale") == 0.4
    assert DCTConfig(density_per_parameter={"*.weight": 0.3}).density_of("scale") == 0.2


def test_patterns_mind_the_case() -> None:
    assert DCTConfig(density_per_parameter={"*.Weight": 0.3}).density_of("a.weight") == 0.2


def test_patterns_without_a_parameter_are_refused() -> None:
    DCTConfig(density_per_parameter={"*.weight": 0.3, "layers.?.linear.bias": 0.1}).check_patterns(NAMES)
    DCTConfig().check_patterns([])
    with pytest.raises(ValueError, match=r"`density_per_parameter` has the pattern '\*\.wieght'.*'embedding\.weight'"):
        DCTConfig(density_per_parameter={"*.weight": 0.3, "*.wieght": 0.1}).check_patterns(NAMES)
