"""Makes the present version's figures: ``python experiments/evidence.py``.

A folder of the same name holds the figures and does the work.
"""

import sys

from evidence.command import main

if __name__ == "__main__":
    sys.exit(main())
