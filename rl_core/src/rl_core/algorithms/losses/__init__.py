"""Losses over log-probabilities; they never see logits, ranks or packing."""
