"""Rewards as plain Python functions."""
