"""Processes, placement and deadlines; the only rooms that import Ray."""
