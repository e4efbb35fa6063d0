"""Metrics: recording, timing and loggers."""
