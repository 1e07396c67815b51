"""The comparison with the rivals: training steps on links of a given rate, and kernels beside the
floor of memory.
"""
