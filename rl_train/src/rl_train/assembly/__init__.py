"""Builds a run and all of its components from a config; may import every package but those that start runs."""
