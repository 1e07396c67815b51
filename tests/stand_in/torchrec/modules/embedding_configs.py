"""The configurations' fields that are read."""

from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from math import sqrt
from typing import Any

import torch


class DataType(Enum):
    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"
    INT8 = "INT8"


class PoolingType(Enum):
    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


def data_type_to_dtype(data_type):
    return {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}[data_type.value]


@dataclass
class EmbeddingConfig:
    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: DataType = DataType.FP32
    feature_names: list = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    init_fn: Any = None
    use_virtual_table: bool = False

    def __post_init__(self):
        if self.init_fn is None:
            bound = sqrt(1 / self.num_embeddings)
            low = -bound if self.weight_init_min is None else self.weight_init_min
            high = bound if self.weight_init_max is None else self.weight_init_max
            self.init_fn = partial(torch.nn.init.uniform_, a=low, b=high)


@dataclass
class EmbeddingBagConfig(EmbeddingConfig):
    pooling: PoolingType = PoolingType.SUM
