"""Conformance kit for components of the training runtime; see `rl_core.testing` and docs/conformance.md."""

from rl_core.first_use import import_on_first_use

__all__ = ["AlgorithmConformance", "DatasetConformance", "LoggerConformance"]

__getattr__ = import_on_first_use(
    __name__, {".algorithm": "AlgorithmConformance", ".dataset": "DatasetConformance", ".logger": "LoggerConformance"}
)
