"""Bytes and time of a run before it starts: the code behind ``lightning-dct plan``.

    workload      the tensors that are synchronised, and their buckets
    bytes_sent    the bytes that each rank gives to the collectives in a step, for each exchange
    timing        compressing on this machine, and the link between ranks, measured for a moment
    forecast      bytes over the rate of a link, residuals, and the choice of ``exchange="auto"``, also as text

Sizes come from the plans, the shards and the traffic formulas of a run. Tests compare them with the counters of runs.
"""
