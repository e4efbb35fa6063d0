"""What a backend, an environment, a loss, a dataset or a logger must be; no logic."""
