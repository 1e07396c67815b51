"""Connects ranks so that all of them end together when one dies or fails, and act together on a
signal.
"""
