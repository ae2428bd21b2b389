"""The version of the distribution, in a file of its own so that packaging reads it without importing torch."""

__version__ = "0.1.0"
