"""`rlcore env`: commands for developing environments."""

from __future__ import annotations

from rlcore_cli.lazy import lazy_app

ENV_COMMANDS = {
    "play": ("rlcore_cli.check_env:play_env", "Play one rollout against an environment and print each turn and reward."),
    "rescore": ("rlcore_cli.check_env:rescore_run", "Score the stored rollouts of a run again and print the differences."),
}
"""Command name: import path of its function, and its line in `rlcore env --help`."""


app = lazy_app(ENV_COMMANDS)


@app.callback()
def env() -> None:
    """Develop an environment without a model or a run. `rlcore check env` checks it.

    Example:
        rlcore env play guess
        rlcore env rescore runs/config
    """
