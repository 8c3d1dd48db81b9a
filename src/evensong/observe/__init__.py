"""Metrics, the stats line and start-up phases."""
