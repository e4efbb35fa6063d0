"""Writes the provenance of a run to its folder: the config, the origin of each value, and the installed versions."""

from __future__ import annotations

import datetime
import json
import os
import platform
import socket
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from rl_core.plugins.import_path import MODULE_FOLDERS
from rl_core.plugins.manager import PluginManager
from rl_core.plugins.record import Status
from rl_train.config.loader import LoadedConfig
from rl_train.config.provenance import Origin
from rl_train.config.sources import PROVENANCE as PROVENANCE

CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"


def write_origins(folder: Path, loaded: LoadedConfig, manager: PluginManager) -> None:
    """Write config.yaml, provenance.json and environment.json; a resume replaces them.

    Args:
        folder: the run folder.
        loaded: the config.
        manager: the plugins of this process.
    """
    (folder / CONFIG).write_text(loaded.to_yaml(), encoding="utf-8")
    provenance = {
        "file": str(loaded.path),
        "folders": [*dict.fromkeys([os.getcwd(), *MODULE_FOLDERS])],
        "overrides": list(loaded.overrides),
        "values": {key: _origin(origin) for key, origin in loaded.source.items()},
    }
    _write_json(folder / PROVENANCE, provenance)
    _write_json(folder / ENVIRONMENT, environment(manager))


def environment(manager: PluginManager) -> dict[str, Any]:
    """This process, its plugins, and the installed versions of their requirements. Does not import them."""
    ready = [plugin for plugin in manager.plugins if plugin.status is Status.READY]
    required = {
        Requirement(check.requirement).name: check.installed
        for plugin in ready
        for check in plugin.requirements
        if check.installed is not None
    }
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "plugins": {plugin.name: f"{plugin.distribution} {plugin.version}" for plugin in ready},
        "distributions": dict(sorted(required.items())),
    }


def _origin(origin: Origin) -> dict[str, str]:
    location = origin.location
    kind = "default" if location is None else "file" if location.number is None else "override"
    return {"kind": kind, "source": str(origin)}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
