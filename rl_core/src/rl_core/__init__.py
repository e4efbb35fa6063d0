"""The API for rlcore plugins: interfaces, hooks, batches, the Ray cluster and weight synchronization."""

__version__ = "0.1.0"
