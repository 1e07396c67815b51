"""Bytes and time of a run before it starts, and the settings that it takes: the code behind ``lightning-dct plan``.

Sizes come from the plans, the shards and the traffic formulas of a run. Tests compare them with the counters of runs.
"""
