"""The package's version, kept here alone."""

__version__ = "0.1.0"
