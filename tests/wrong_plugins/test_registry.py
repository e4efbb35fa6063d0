"""Every wrong plugin is in the registry."""

from pathlib import Path

import pytest
from wrong_plugins.registry import COMMANDS, DATASETS, ENGINES, ENVIRONMENTS, LOGGERS, LOSSES, POLICIES, SANDBOXES, TRANSPORTS

FOLDERS = {
    "engines": ENGINES,
    "policies": POLICIES,
    "environments": ENVIRONMENTS,
    "transports": TRANSPORTS,
    "sandboxes": SANDBOXES,
    "commands": COMMANDS,
    "datasets": DATASETS,
    "loggers": LOGGERS,
    "losses": LOSSES,
}


@pytest.mark.parametrize(("folder", "plugins"), FOLDERS.items())
def test_the_registry_has_every_plugin(folder, plugins):
    files = (Path(__file__).parent / folder).glob("*.py")
    assert {file.stem for file in files} - {"base", "right", "scales_as_declared"} == plugins.keys()


def test_at_least_twenty_kinds_of_engines_are_wrong_and_eight_were_written_after_the_checks():
    assert len(ENGINES) >= 20
    assert sum(engine.frozen for engine in ENGINES.values()) >= 8
