"""Trains the zoo: ``python experiments/zoo.py --strategy ddp --strategy dct``.

A folder of the same name holds the trainings and does the work.
"""

import sys

from zoo.command import main

if __name__ == "__main__":
    sys.exit(main())
