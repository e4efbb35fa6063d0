"""Predicts the memory of a run from its config, and its time on named GPUs (`rlcore plan`)."""
