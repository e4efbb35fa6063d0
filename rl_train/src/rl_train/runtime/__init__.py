"""Builds a Run from a config; may import every other package of rl_train."""
