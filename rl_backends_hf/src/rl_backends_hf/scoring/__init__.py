"""Scores tokens: the model's backbone, then a head on selected positions."""
