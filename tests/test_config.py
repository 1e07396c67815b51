import pickle
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from lightning_dct import DCTConfig
from lightning_dct.config import VALUE_FORMATS

NAMES = ["embedding.weight", "layers.0.linear.weight", "layers.0.linear.bias"]


@pytest.mark.parametrize(
    ("setting", "value", "error"),
    [
        ("density", 0, ValueError),
        ("density", 1.0000001, ValueError),
        ("density", float("nan"), ValueError),
        ("density", "x", TypeError),
        ("density", True, TypeError),
        ("density_per_parameter", [("a", 0.1)], TypeError),
        ("density_per_parameter", 0.1, TypeError),
        ("refresh_every", 0, ValueError),
        ("refresh_every", 10.0, TypeError),
        ("refresh_every", True, TypeError),
        ("warmup_steps", -1, ValueError),
        ("warmup_steps", 1.5, TypeError),
        ("residual_decay", 0.0, ValueError),
        ("residual_decay", 1.1, ValueError),
        ("value_format", "fp16", ValueError),
        ("value_format", 16, ValueError),
        ("min_tensor_size", -1, ValueError),
        ("min_tensor_size", 0.5, TypeError),
        ("exchange", "ring", ValueError),
        ("kernel", "cuda", ValueError),
        ("adapt_threshold", 1, TypeError),
        ("local_steps", 0, ValueError),
        ("local_steps", 2.5, TypeError),
        ("overlap_steps", -1, ValueError),
        ("compress", "weights", ValueError),
    ],
)
def test_bad_settings_are_named(setting: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"`{setting}`") as raised:
        DCTConfig(**{setting: value})
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"local_steps": 4, "overlap_steps": 5}, "Lower `overlap_steps` or raise `local_steps`"),
        *(
            (
                {"compress": "gradients", **one},
                r"residuals; got [a-z_]+=[0-9.]+\. Leave that out, or use `compress='updates'`",
            )
            for one in (
                {"local_steps": 4},
                {"overlap_steps": 1},
                {"warmup_steps": 5},
                {"residual_decay": 0.5},
            )
        ),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DCTConfig(**settings)


@pytest.mark.parametrize(
    ("density", "error"), [(0, ValueError), (1.5, ValueError), ("x", TypeError)]
)
def test_bad_densities_of_parameters_name_their_pattern(
    density: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"`density_per_parameter\['\*\.bias'\]`"):
        DCTConfig(density_per_parameter={"*.weight": 0.1, "*.bias": density})


def test_the_choices_are_listed() -> None:
    with pytest.raises(ValueError) as raised:
        DCTConfig(value_format="fp8")  # type: ignore[arg-type]
    assert all(repr(name) in str(raised.value) for name in VALUE_FORMATS)


@pytest.mark.parametrize(
    "mapping", [dict, MappingProxyType, OmegaConf.create], ids=["dict", "proxy", "DictConfig"]
)
def test_densities_of_parameters_become_a_private_plain_dict(
    mapping: type[Mapping[str, float]],
) -> None:
    given_densities: dict[str, Any] = {"*.embedding.weight": 0.001, "*.bias": 1}
    config = DCTConfig(density_per_parameter=mapping(given_densities))
    given_densities["*.bias"] = 0.5
    assert config.density_per_parameter == {"*.embedding.weight": 0.001, "*.bias": 1.0}
    assert type(config.density_per_parameter) is dict
    assert all(type(density) is float for density in config.density_per_parameter.values())


def test_numbers_of_numpy_become_plain_ones() -> None:
    """As YAML can write them."""
    config = DCTConfig(
        local_steps=np.int64(4),
        density=np.float64(0.2),
        refresh_every=np.int32(7),
        min_tensor_size=1,
    )
    assert config == DCTConfig(local_steps=4, density=0.2, refresh_every=7, min_tensor_size=1)
    assert {type(value) for value in vars(config).values()} <= {
        int,
        float,
        str,
        bool,
        dict,
        type(None),
    }


def test_pickles() -> None:
    config = DCTConfig(
        density=0.05, density_per_parameter=OmegaConf.create({"a*": 0.5}), value_format="2bit"
    )
    assert pickle.loads(pickle.dumps(config)) == config
    assert replace(config, adapt_threshold=False).density_per_parameter == {"a*": 0.5}


def test_the_first_pattern_that_matches_wins() -> None:
    config = DCTConfig(density_per_parameter={"layers.0.*": 0.2, "*.weight": 0.3, "*": 0.4})
    assert [config.density_of(name) for name in NAMES] == [0.3, 0.2, 0.2]
    assert config.density_of("scale") == 0.4
    assert (
        DCTConfig(density=0.5, density_per_parameter={"*.weight": 0.3}).density_of("scale") == 0.5
    )


def test_patterns_without_a_parameter_are_refused() -> None:
    DCTConfig(density_per_parameter={"*.weight": 0.3, "layers.?.linear.bias": 0.1}).check_patterns(
        NAMES
    )
    DCTConfig().check_patterns([])
    with pytest.raises(
        ValueError,
        match=r"`density_per_parameter` has the pattern '\*\.wieght'.*'embedding\.weight'",
    ):
        DCTConfig(density_per_parameter={"*.weight": 0.3, "*.wieght": 0.1}).check_patterns(NAMES)
