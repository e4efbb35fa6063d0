"""`rlcore new-plugin`: writes the repository of a plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlcore_cli.new_plugin.scaffold import PLUGIN_KINDS


def new_plugin(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the component: what a config will contain.", show_default=False)
    ],
    kind: Annotated[str, typer.Option(help=f"One of {', '.join(PLUGIN_KINDS)}.", show_default=False)],
) -> None:
    """Write the repository of a plugin into the new folder `rlcore-NAME`.

    It has a small working component with a config model, conformance tests, a config that trains three steps, and a CI file.

    Example:
        rlcore new-plugin long-sums --kind environment
        rlcore new-plugin acme --kind loss
    """
    from rl_core.errors import ConfigError
    from rl_core.plugins.component import did_you_mean
    from rlcore_cli.new_plugin.scaffold import write_plugin

    if kind not in PLUGIN_KINDS:
        raise ConfigError(
            f"There is no kind {kind!r}.{did_you_mean(kind, PLUGIN_KINDS)} Choose one of {', '.join(PLUGIN_KINDS)}."
        )
    folder = write_plugin(name, kind, Path())
    print(f"Wrote {folder}. Next:\n  cd {folder}\n  pip install -e '.[test]'\n  pytest")
