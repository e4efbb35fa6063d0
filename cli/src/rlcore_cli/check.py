"""`rlcore check`: the checks that start parts of a run."""

from __future__ import annotations

from rlcore_cli.lazy import lazy_app

CHECKS = {
    "logprobs": (
        "rlcore_cli.check_model:check_logprobs",
        "Compare the log-probabilities of policy and generation backend.",
    ),
    "env": (
        "rlcore_cli.env:check_env",
        "Check an environment without a model: types, unchanged arguments, determinism, scores.",
    ),
    "plugin": (
        "rlcore_cli.check_plugin:check_plugin",
        "Check whether a plugin keeps the promises of its interfaces.",
    ),
    "model": ("rlcore_cli.check_model:diagnose", "Check model, tokenizer and backends before a run."),
}
"""Check name: import path of its function, and its line in `rlcore check --help`."""


app = lazy_app(CHECKS)


@app.callback()
def check() -> None:
    """Check policy, generation backend, model, tokenizer, environment or plugin by running them.

    `rlcore validate` checks a config without running anything, and `rlcore doctor` checks the installation. Aliases:
    `rlcore check-logprobs` for `rlcore check logprobs`, `rlcore diagnose` for `rlcore check model`.

    Example:
        rlcore check logprobs config.yaml
        rlcore check model config.yaml
        rlcore check env sliding_puzzle
        rlcore check plugin acme
    """
