"""Predicts the memory of a run from its config (`rlcore plan`)."""
