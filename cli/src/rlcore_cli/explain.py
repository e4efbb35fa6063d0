"""`rlcore explain`: describes a config key, its allowed values, its default and its current value."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_core.errors import ConfigError
from rlcore_cli.arguments import Overrides


def _completed_key(incomplete: str) -> list[str]:
    """The keys that begin with what was typed, up to their next dot."""
    from rl_core.plugins.manager import discover
    from rl_core.plugins.registry import Registry
    from rl_train.config.schema_index import schema_index
    from rlcore_cli.explanation import known_keys

    parts = incomplete.count(".") + 1
    keys = known_keys(schema_index(Registry(discover())))
    return sorted({".".join(key.split(".")[:parts]) for key in keys if key.startswith(incomplete)})


def explain(
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY", help="A config key, such as policy.generation.temperature.", autocompletion=_completed_key
        ),
    ],
    overrides: Overrides = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="A config file: show the value of the key and where it comes from.")
    ] = None,
    component: Annotated[
        str | None,
        typer.Option(
            "--component", "-n", help="The component to describe, for a section such as loss_fn that several components have."
        ),
    ] = None,
) -> None:
    """Explain a config key: meaning, type, allowed values, default and users, and with --config its value and origin.

    Example:
        rlcore explain policy.generation.temperature
        rlcore explain policy.generation.temperature --config config.yaml
        rlcore explain grpo
        rlcore explain loss_fn --component dpo
    """
    if overrides and config is None:
        raise ConfigError(f"Overrides ({', '.join(overrides)}) need a config file: give it with --config.")
    from rl_train.config.loader import load_config
    from rl_train.config.sources import refuse_missing
    from rlcore_cli.explanation import explain_anywhere, explain_in

    if config is not None:
        refuse_missing(config)
        explain_in(load_config(config, overrides or [], stages=()), key)
    else:
        explain_anywhere(key, component)
