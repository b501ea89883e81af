"""Workloads, load generator and comparisons with peers."""
