"""Atomic checkpoint folders, and the state needed to resume."""
