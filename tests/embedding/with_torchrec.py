"""Names of TorchRec for tests.

A stand-in takes its place where it is not installed, so import this before it.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

IS_REAL = find_spec("torchrec") is not None and find_spec("fbgemm_gpu") is not None
if not IS_REAL:
    sys.path.append(str(Path(__file__).parents[1] / "stand_in"))

_configs = import_module("torchrec.modules.embedding_configs")
_tensors = import_module("torchrec.sparse.jagged_tensor")
DataType = _configs.DataType
PoolingType = _configs.PoolingType
KeyedJaggedTensor = _tensors.KeyedJaggedTensor
KeyedTensor = _tensors.KeyedTensor
