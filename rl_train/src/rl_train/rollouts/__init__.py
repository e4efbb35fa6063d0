"""Prompts through generation and environments to a batch."""
