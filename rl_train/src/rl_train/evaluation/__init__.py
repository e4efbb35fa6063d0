"""Evaluates and diagnoses models without training."""
