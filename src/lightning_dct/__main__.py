"""``python -m lightning_dct``: the command ``lightning-dct``."""

import sys

from lightning_dct.commands import main

if __name__ == "__main__":
    sys.exit(main())
