"""Import this before `lightning_dct.torchrec`: a stand-in takes TorchRec's place where that is not installed."""

import sys
from importlib.util import find_spec
from pathlib import Path

IS_REAL = find_spec("torchrec") is not None and find_spec("fbgemm_gpu") is not None
if not IS_REAL:
    sys.path.append(str(Path(__file__).parents[1] / "stand_in"))
