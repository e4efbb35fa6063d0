"""The `rlcore` command: its list of commands, and how errors reach the terminal. It imports no command before it is run.

To add a command: write `rlcore_cli/NAME.py` with a function whose arguments carry Typer's annotations and whose docstring
ends with an `Example:`, and add one line to `COMMANDS`.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from typing import Annotated, Any

import typer

from rl_core.errors import PluginHookError, RLCoreError, RunInterrupted
from rlcore_cli.lazy import LazyGroup

COMMANDS = {
    "train": ("rlcore_cli.train:train", "Train by a config, from its last checkpoint if there is one."),
    "eval": ("rlcore_cli.eval:evaluate", "Ask a model or a checkpoint the validation data: pass@k, cons@k, rewards."),
    "report": ("rlcore_cli.report.command:report", "One page of HTML about a run: curves, rollouts, config, how it ended."),
    "compare": ("rlcore_cli.compare.command:compare", "Runs against each other: curves, configs, final and best values."),
    "validate": ("rlcore_cli.validate:validate", "Check a config; every mistake with its line."),
    "import-config": ("rlcore_cli.import_config:import_config", "A config of NeMo RL as ours, and what became of each key."),
    "explain": ("rlcore_cli.explain:explain", "What a key of the config means, holds and may hold."),
    "schema": ("rlcore_cli.schema:schema", "The JSON schema of configs, for editors."),
    "check-logprobs": ("rlcore_cli.check_logprobs:check_logprobs", "Do policy and engine agree on probabilities?"),
    "convert": ("rlcore_cli.convert:convert", "A checkpoint as a folder that others load; adapters alone, or merged."),
    "diagnose": ("rlcore_cli.diagnose:diagnose", "Look model, tokenizer and backends over before a run."),
    "list-backends": ("rlcore_cli.listing:list_backends", "What a config can name, and whether it is ready."),
    "list-plugins": ("rlcore_cli.listing:list_plugins", "The installed plugins, what they register, how they fare."),
    "doctor": ("rlcore_cli.doctor:doctor", "Why a plugin does not work: requirements, import, traceback."),
}
"""Command name: where its function is, and the line that `rlcore --help` shows."""
INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""


class Commands(LazyGroup):
    """The commands of this distribution, and those that plugins add."""

    builtin = COMMANDS

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """As in every lazy group; a config in the place of a command is a forgotten `train`."""
        if cmd_name.endswith((".yaml", ".yml")):
            ctx.fail(f"No such command {cmd_name!r}. To train by this file: rlcore train {cmd_name}")
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    cls=Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)


def _print_versions(wanted: bool) -> None:
    from importlib.metadata import version

    if wanted:
        for distribution in ("rlcore", "rl-core"):
            print(f"{distribution} {version(distribution)}")
        raise typer.Exit


@app.callback()
def rlcore(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_versions, is_eager=True, help="Print the versions and stop."),
    ] = False,
) -> None:
    """Post-training of language models by reinforcement learning, from one YAML file.

    Example:
        rlcore list-backends
        rlcore train config.yaml
    """
    # What a config names by a dotted path may lie in the working directory, as with `python -m`.
    sys.path.insert(0, os.getcwd())


def main() -> None:
    """Runs the command line; never returns.

    Exit codes: 0 done, 2 a mistake in what the user gave, 1 a run that broke. A run that was asked to stop: 130 by Ctrl-C, 143
    by SIGTERM, 129 by SIGHUP, 124 by `checkpointing.max_time`. An error that rlcore explains is printed without a traceback;
    any other keeps its own, and so does what a plugin's event hook raised.
    """
    try:
        app()
    except RLCoreError as error:
        if isinstance(error, PluginHookError):
            # The author of the hook needs its traceback, and the user that of the run's own error, if one came before.
            traceback.print_exception(error.__cause__)
        # An interrupt is what the user asked for, and no error.
        with suppress(OSError):  # the terminal may be gone, which may be why
            print(error if isinstance(error, RunInterrupted) else f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    main()
