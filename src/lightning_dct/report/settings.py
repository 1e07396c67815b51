"""Settings as flat text, read without building any Python object, and which of them differ between runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

HIDDEN = ("paths.", "hydra.", "logger.", "wandb_version", "_wandb", "callbacks.progress_bar.", "run.")
"""Beginnings of names that say where a run has written, not what it was."""

MOST_CHARACTERS = 200_000
"""The most that a file of settings may hold with its aliases expanded; a page could not show more."""


class _TextLoader(yaml.SafeLoader):
    """Reads YAML, and tags for Python objects as text: a file of settings must not run code."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Leave merge keys unexpanded: no logger writes them, and each may double a file."""


def _as_text(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return loader.construct_scalar(node) or suffix.rpartition(":")[2]
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return loader.construct_mapping(node, deep=True)


_TextLoader.add_multi_constructor("", _as_text)


def read_settings(file: Path) -> tuple[dict[str, str], list[str]]:
    """Read the settings in ``hparams.yaml`` or Hydra's ``config.yaml``; what cannot be read is at most one sentence."""
    content, problems = load_yaml(file)
    if content is None:
        return {}, problems
    if not isinstance(content, dict):
        return {}, [f"{file}: left out, it holds no names"]
    return shown(flattened(content)), []


def load_yaml(file: Path) -> tuple[Any, list[str]]:
    """Read a YAML file; what cannot be read is at most one sentence."""
    try:
        with file.open(encoding="utf-8") as content:
            text = content.read(MOST_CHARACTERS + 1)
        if len(text) > MOST_CHARACTERS:
            raise ValueError(f"it holds more than {MOST_CHARACTERS:,} characters")
        loader = _TextLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None, []
        if _characters(node, {}) > MOST_CHARACTERS:
            raise ValueError(f"it stands for more than {MOST_CHARACTERS:,} characters, its aliases written out")
        return loader.construct_document(node), []
    except RecursionError:
        return None, [f"{file}: left out, it is nested too deep"]
    except (OSError, ValueError, yaml.YAMLError) as error:
        return None, [f"{file}: left out, {' '.join(str(error).split())}"]


def _characters(node: yaml.Node, known: dict[yaml.Node, float]) -> float:
    """The size of a node with every alias expanded; infinite if it contains itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1 + len(node.value)
    if node not in known:
        # Only a node that contains itself asks for this value.
        known[node] = math.inf
        children = (
            [child for pair in node.value for child in pair] if isinstance(node, yaml.MappingNode) else node.value
        )
        known[node] = 1 + sum(_characters(child, known) for child in children)
    return known[node]


def flattened(nested: Mapping[Any, Any], prefix: str = "") -> dict[str, str]:
    """Join names with dots; lists and empty groups stay one value.

    Example:
        >>> flattened({"strategy": {"density": 0.03, "guard": True}, "seed": None, "sizes": [16, 8]})
        {'strategy.density': '0.03', 'strategy.guard': 'true', 'seed': 'null', 'sizes': '[16, 8]'}
    """
    flat: dict[str, str] = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{name}.")
        else:
            flat[name] = _text(value)
    return flat


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    return str(value)


def shown(settings: Mapping[str, str]) -> dict[str, str]:
    """Leave out where a run has written, and how Hydra converts lists."""
    return {
        name: text for name, text in settings.items() if not name.startswith(HIDDEN) and not name.endswith("._convert_")
    }


def differing(runs: Sequence[Mapping[str, str]]) -> tuple[list[str], list[str]]:
    """Names whose values differ or that only some runs have, and names that are the same everywhere.

    Runs without any settings are ignored.
    """
    known = [settings for settings in runs if settings]
    names = list(dict.fromkeys(name for settings in known for name in settings))
    differ = [name for name in names if len({settings.get(name) for settings in known}) > 1]
    return differ, [name for name in names if name not in set(differ)]
