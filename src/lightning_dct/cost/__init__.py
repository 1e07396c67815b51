"""Bytes and time of a run before it starts, and the settings that it takes: the code behind
``lightning-dct plan``.
"""
