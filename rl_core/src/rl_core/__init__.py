"""The API for rlcore plugins: interfaces, hooks, batches, the Ray cluster and weight synchronization."""

from rl_core.old_paths import install

__version__ = "0.1.0"

install()
