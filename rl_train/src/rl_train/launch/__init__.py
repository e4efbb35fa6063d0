"""Runs a config file from start to end: signals, events, status and exit."""
