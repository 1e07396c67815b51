"""All that is saved and read: one format, one reader, one way back.

CONTRIBUTING.md says which file does what.
"""
