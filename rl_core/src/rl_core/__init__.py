"""rl-core: the interfaces, the data, the cluster and the algorithms of rlcore; it knows no backend."""

__version__ = "0.1.0"
