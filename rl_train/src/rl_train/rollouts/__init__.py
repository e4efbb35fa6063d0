"""Rollouts: prompts, generation, environments, batches."""
