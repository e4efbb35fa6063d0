"""`rlcore schema`: the JSON schema, or the reference page, of configs with the installed plugins."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def schema(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Output file; standard output by default.")] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Write the config reference as Markdown instead of the JSON schema.")
    ] = False,
    plugins: Annotated[
        str | None, typer.Option(help="Include only the sections of these plugins, for example train,hf; all by default.")
    ] = None,
) -> None:
    """Write the JSON schema of config files, including the sections of all installed plugins.

    Editors with a YAML language server complete and check a config that starts with the line
    `# yaml-language-server: $schema=config.schema.json`.

    Example:
        rlcore schema --output config.schema.json
        rlcore schema --markdown --plugins train,hf
    """
    from rl_core.errors import PluginError, UserError
    from rl_core.plugins.component import did_you_mean
    from rl_core.plugins.manager import discover
    from rl_core.plugins.registry import Registry
    from rl_train.config.json_schema import json_schema
    from rl_train.config.reference import reference
    from rl_train.config.schema_index import schema_index

    registry = Registry(discover())
    wanted = None if plugins is None else [name.strip() for name in plugins.split(",")]
    known = [plugin.name for plugin in registry.manager.plugins]
    for name in wanted or ():
        if name not in known:
            raise PluginError(f"No plugin is named {name!r}.{did_you_mean(name, known)} Plugins: {', '.join(known)}.")
    index = schema_index(registry, plugins=wanted)
    for sentence in index.unusable:
        print(f"warning: omitted: {sentence}", file=sys.stderr)
    text = (
        reference(index, plugins=plugins or ",".join(known))
        if markdown
        else json.dumps(json_schema(index), indent=2, ensure_ascii=False) + "\n"
    )
    if output is None:
        print(text, end="")
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}. Choose another file with --output.") from error
    print(f"Wrote {output}: {len(index.sections)} sections")
