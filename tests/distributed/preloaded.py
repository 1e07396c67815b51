"""What the fork server imports for all ranks. The garbage collection that ends every fit passes it over."""

import contextlib
import gc

import lightning.pytorch  # noqa: F401

import lightning_dct  # noqa: F401

with contextlib.suppress(ImportError):
    import numba  # noqa: F401
    import rich.table  # noqa: F401

gc.collect()
gc.freeze()
