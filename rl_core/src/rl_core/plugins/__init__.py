"""Finds what is installed and describes it; imports nothing heavier than pluggy."""
