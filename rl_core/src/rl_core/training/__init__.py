"""Shared code of policy workers: their base class, microbatches, optimizer and schedule settings, training-state files."""
