"""The `rlcore` command: its subcommands and error handling. Subcommands are imported when they run.

To add a command: write `rlcore_cli/NAME.py` with a function that has Typer annotations and a docstring that ends with an
`Example:` section, and add one line to `COMMANDS` and its name to `SECTIONS`.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

import rl_train
from rl_core.compute_variables import compute_variables
from rl_core.errors import RLCoreError
from rl_train.errors import PluginHookError, RunInterrupted, lost_interrupts
from rl_train.garbage_collection import late_first_collection
from rlcore_cli.lazy import PluginGroup, typer_app

COMMANDS = {
    "init": ("rlcore_cli.starter.command:init", "Write a config, and a reward function if needed, for a data file."),
    "train": ("rlcore_cli.train:train", "Train with a config, resuming from its last checkpoint if any."),
    "eval": ("rlcore_cli.eval:evaluate", "Evaluate a model or checkpoint on the validation data."),
    "report": ("rlcore_cli.report.page:report", "Write an HTML report of a run: curves, rollouts, config."),
    "runs": ("rlcore_cli.runs:runs", "List the runs in a folder: status, steps, best metric, disk use."),
    "watch": ("rlcore_cli.watch:watch", "Show a live page of a run in a browser."),
    "compare": ("rlcore_cli.compare:compare", "Compare runs: curves, configs, final and best values."),
    "validate": ("rlcore_cli.validate:validate", "Check a config and report every error with its line."),
    "plan": ("rlcore_cli.plan:plan", "Predict the memory of a run, and what to change if it does not fit."),
    "check": ("rlcore_cli.check:app", "Check model, tokenizer, backends or an environment by running them."),
    "env": ("rlcore_cli.env:app", "Play against an environment without a model, or score stored rollouts again."),
    "doctor": ("rlcore_cli.doctor:doctor", "Check the installation: plugins, requirements, open ports."),
    "data": ("rlcore_cli.data:app", "Show the rows that a run would read: rendered, measured and compared."),
    "prompt": ("rlcore_cli.prompt:app", "List prompt configs, and print the messages of one for a row."),
    "explain": ("rlcore_cli.explain:explain", "Explain a config key: meaning, allowed values, default."),
    "schema": ("rlcore_cli.explain:schema", "Write the JSON schema of config files, for editors."),
    "convert": ("rlcore_cli.convert:convert", "Convert a checkpoint to Hugging Face format."),
    "import-config": (
        "rlcore_cli.import_config:import_config",
        "Convert a NeMo RL config and report what happened to each key.",
    ),
    "new-plugin": ("rlcore_cli.new_plugin.scaffold:new_plugin", "Write the repository of a plugin, with tests and a config."),
    "list-backends": ("rlcore_cli.listing:list_backends", "List policy and generation backends and their status."),
    "list-plugins": ("rlcore_cli.listing:list_plugins", "List installed plugins, their components and status."),
}
"""Command name: import path of its function or application, and its line in `rlcore --help`."""
SECTIONS = {
    "Set up": ("init", "data", "prompt", "validate", "check", "plan", "explain", "schema", "import-config", "doctor"),
    "Train": ("train", "eval"),
    "Look": ("runs", "watch", "report", "compare", "env"),
    "Serve": ("chat", "serve", "convert"),
    "Extend": ("new-plugin", "list-backends", "list-plugins"),
}
"""Headings of `rlcore --help` and the commands below each."""
_BASES = Path(rl_train.__file__).parent / "config" / "base_configs"
ALIASES: dict[str, tuple[str, ...]] = {
    "check-logprobs": ("rlcore_cli.check_model:check_logprobs", "Alias of `rlcore check logprobs`."),
    "diagnose": ("rlcore_cli.check_model:diagnose", "Alias of `rlcore check model`."),
    "start_grpo": (
        "rlcore_cli.train:train",
        "`rlcore train` over the packaged grpo.yaml.",
        "--config",
        str(_BASES / "grpo.yaml"),
    ),
    "start_sft": ("rlcore_cli.train:train", "`rlcore train` over the packaged sft.yaml.", "--config", str(_BASES / "sft.yaml")),
}
"""Commands that work but are not listed in `rlcore --help`; arguments after the help line come before those of the user."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, the same as in shells."""


class Commands(PluginGroup):
    """The built-in commands and those of plugins."""

    builtin = COMMANDS
    sections = SECTIONS
    aliases = ALIASES

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command; a config file instead of a command is an error that suggests `rlcore train`."""
        if cmd_name.endswith((".yaml", ".yml")):
            ctx.fail(f"No such command {cmd_name!r}. To train with this config: rlcore train {cmd_name}")
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: Any) -> int:
        """Run the command; 0, because what its function returns is not an exit code."""
        super().invoke(ctx)
        return 0


app = typer_app(Commands)


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
        typer.Option("--version", callback=_print_versions, is_eager=True, help="Print the versions and exit."),
    ] = False,
) -> None:
    """RL post-training of language models from one YAML file.

    Example:
        rlcore list-backends
        rlcore train config.yaml
    """
    # Import paths in a config can refer to modules in the working directory, as with `python -m`.
    sys.path.insert(0, os.getcwd())


def command() -> None:
    """The installed command: runs `main`, and neither searches nor frees the objects that imports make."""
    late_first_collection()
    try:
        main()
    except SystemExit as end:
        status = 0 if end.code is None else end.code
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        try:
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
        except (OSError, ValueError):
            raise end from None  # Python reports at its end that the output could not be written
        os._exit(status)


def main() -> None:
    """Runs the command line; never returns.

    Exit codes: 0 success, 1 failed run or check, 2 user error. A run that is stopped exits with 130 (Ctrl-C), 143 (SIGTERM),
    129 (SIGHUP) or 124 (`checkpointing.max_time`). Errors of rlcore are printed without a traceback; unexpected exceptions and
    exceptions from event hooks of plugins are printed with one.
    """
    # Set before any command imports torch, which loads OpenMP.
    os.environ.update(compute_variables())
    if not (sys.stdout and sys.stdout.isatty()):  # it is None if it was closed
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # Ray colors the lines of workers in redirected output as well
    again = partial(signal.pthread_kill, threading.main_thread().ident or 0, signal.SIGINT)
    try:
        with lost_interrupts(again):
            status = app(prog_name="rlcore", standalone_mode=False)
    except typer.TyperException as error:
        _print_usage_error(error)
        raise SystemExit(error.exit_code) from None
    except typer.Abort:
        print("error: The input ended before a prompt was answered.", file=sys.stderr)
        raise SystemExit(1) from None
    except RLCoreError as error:
        if isinstance(error, PluginHookError):
            # The author of the hook needs its traceback. It includes the run's own error if one came before.
            traceback.print_exception(error.__cause__)
        # An interrupt was requested by the user and is not an error.
        with suppress(OSError):  # the terminal may be closed
            print(error if isinstance(error, RunInterrupted) else f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    raise SystemExit(status)


def _print_usage_error(error: typer.TyperException) -> None:
    """Print a mistake in the command line like other errors; without any argument, the help."""
    key = str(getattr(error, "option_name", "")).lstrip("-")
    # The class of unknown options is private. Its possibilities may share only the dashes with what was given.
    if is_unknown := hasattr(error, "possibilities"):
        near = get_close_matches(key, [each.lstrip("-") for each in error.possibilities or ()])
        error.possibilities = [f"--{each}" for each in near]
    message, context = error.format_message(), getattr(error, "ctx", None)
    if context is not None and message == context.get_help():
        print(message, file=sys.stderr)
    else:
        hint = f"\nSee `{context.command_path} --help`." if context is not None else ""
        if context is not None and is_unknown and not near and any(each.name == "overrides" for each in context.command.params):
            name = key.replace("-", "_")
            hint = f"\nKeys of the config have no dashes: `rlcore explain {name}` finds one, and key=value sets it.{hint}"
        print(f"error: {message}{hint}", file=sys.stderr)


if __name__ == "__main__":
    main()
