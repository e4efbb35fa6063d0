"""`python -m rl_core.plugins`: lists the installed plugins and their components. Needs no other distribution."""

from __future__ import annotations

import sys

from rl_core.errors import PluginError
from rl_core.plugins.manager import discover


def main() -> int:
    """Print every plugin with its status and components.

    Returns:
        0 if all plugins work or are disabled, 1 if one is broken, 2 if the environment variables for plugins are invalid.
    """
    try:
        manager = discover(strict=False)
    except PluginError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not manager.plugins:
        print("No plugins are installed: no distribution has an entry point in the group rl_core.plugins.")
    for plugin in manager.plugins:
        print(f"{plugin.name}  {plugin.label}  {plugin.status.value}" + (f"\n  {plugin.reason}" if plugin.reason else ""))
        for kind, component in plugin.components:
            print(f"  {kind.label:<18} {component.name:<16} {component.target}")
    for warning in manager.warnings:
        print(f"warning: {warning}")
    return 1 if manager.broken else 0


if __name__ == "__main__":
    sys.exit(main())
