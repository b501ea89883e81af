"""Speculation policies by name; each file cites the paper it implements."""
