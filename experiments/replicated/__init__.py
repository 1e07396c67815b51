"""Many replicas of one training in one process: exchanges in step, one by one on a CPU, stacked on
a GPU.
"""
