"""Keeps the plugins that `rlcore new-plugin` writes today, one of each kind, for tests with later versions.

`python tests/plugins/keep_plugins.py` writes `kept/MINOR.zip` next to it, such as `kept/0.1.zip`, at the first release of a
minor version. Its plugins must work with every later version of the same minor version.
"""

from __future__ import annotations

import zipfile
from importlib.metadata import version
from pathlib import Path

from rlcore_cli.new_plugin.scaffold import PLUGIN_KINDS, plugin_files

NAMES = {option: f"acme-{option.replace('-', '_')}" for option in PLUGIN_KINDS}
KEPT = Path(__file__).with_name("kept") / f"{version('rl-core').rpartition('.')[0]}.zip"


def generated() -> dict[str, str]:
    """The text of each file of a plugin of each kind, by its path below a folder for all."""
    return {
        f"{option}/{path}": text for option, name in NAMES.items() for path, text in sorted(plugin_files(name, option).items())
    }


if __name__ == "__main__":
    KEPT.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(KEPT, "x") as archive:
        for path, text in generated().items():
            archive.writestr(zipfile.ZipInfo(path), text, zipfile.ZIP_DEFLATED)  # without a date, so that it is reproducible
