"""The interfaces, and the names of outputs."""

import abc
from collections import Counter

from torch import nn


class EmbeddingBagCollectionInterface(abc.ABC, nn.Module):
    @abc.abstractmethod
    def embedding_bag_configs(self): ...

    @abc.abstractmethod
    def is_weighted(self): ...


class EmbeddingCollectionInterface(abc.ABC, nn.Module):
    @abc.abstractmethod
    def embedding_configs(self): ...


def get_embedding_names_by_table(tables):
    uses = Counter(name for table in tables for name in table.feature_names)
    return [
        [name if uses[name] == 1 else f"{name}@{table.name}" for name in table.feature_names]
        for table in tables
    ]
