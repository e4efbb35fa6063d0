"""The environment `nemo_gym`: tasks of a resources server of NeMo Gym."""
