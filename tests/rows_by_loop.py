"""The scales of rows, the plainest way."""

import numpy as np

LARGEST = float(np.finfo(np.float32).max)


def scales_by_loop(largest: list[float], levels: int) -> list[float]:
    """The smallest of the scales that a byte can name which is large enough, by the module's
    docstring.
    """
    needed = [float(np.float32(value) / np.float32(levels)) for value in largest]
    needed = [value * (1 - 2.0**-23) if levels * value > LARGEST else value for value in needed]
    top = np.float32(max(needed))
    named = [np.float32(2.0 ** ((code - 254) / 8)) * top for code in range(1, 255)]
    return [
        float(next(scale for scale in named if scale >= value)) if value else 0.0
        for value in needed
    ]
