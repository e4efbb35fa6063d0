"""`rlcore doctor --cluster`: compares the nodes of a Ray cluster before a run."""
