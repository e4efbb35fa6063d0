"""Tasks of Reasoning Gym: generated problems and their scorers, by name."""
