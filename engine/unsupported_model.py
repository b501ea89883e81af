"""The error that refuses a model."""

from __future__ import annotations


class UnsupportedModel(Exception):
    """The model would not run, or would silently give wrong results, on this engine."""
