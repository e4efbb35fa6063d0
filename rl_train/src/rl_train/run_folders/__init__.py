"""What is in a run's folder: provenance, status, checkpoints and the weights at a path."""
