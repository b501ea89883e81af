"""Grafana dashboards, recording rules and alerts, all made from the metric catalog."""
