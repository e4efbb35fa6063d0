"""Every wrong plugin is in the registry."""

from importlib import import_module
from pathlib import Path

import pytest
from wrong_plugins.registry import (
    COMMANDS,
    DATASETS,
    ENGINES,
    ENVIRONMENTS,
    LOGGERS,
    LOSSES,
    PICTURES,
    POLICIES,
    SANDBOXES,
    TRANSPORTS,
)

FOLDERS = {"policies": POLICIES, "commands": COMMANDS}
MODULES = {
    "datasets": DATASETS,
    "engines": ENGINES,
    "environments": ENVIRONMENTS,
    "loggers": LOGGERS,
    "losses": LOSSES,
    "picture_models": PICTURES,
    "sandboxes": SANDBOXES,
    "transports": TRANSPORTS,
}
BASES = {
    "EngineOf",
    "SetsOf",
    "Sums",
    "TwoTurns",
    "Lines",
    "SandboxOf",
    "Files",
    "Right",
    "TwoPictures",
    "OtherImages",
    "RightWithPictures",
}


@pytest.mark.parametrize(("folder", "plugins"), FOLDERS.items())
def test_the_registry_has_every_plugin_of_a_folder(folder, plugins):
    files = (Path(__file__).parent / folder).glob("*.py")
    assert {file.stem for file in files} - {"base", "right", "scales_as_declared"} == plugins.keys()


@pytest.mark.parametrize(("module", "plugins"), MODULES.items())
def test_the_registry_has_every_plugin_of_a_module(module, plugins):
    classes = vars(import_module(f"wrong_plugins.{module}")).values()
    documented = {each.__name__ for each in classes if getattr(each, "__module__", "").endswith(module) and each.__doc__}
    assert {name for name in documented if name[0].isupper()} - BASES == plugins.keys()


def test_at_least_twenty_kinds_of_engines_are_wrong_and_eight_were_written_after_the_checks():
    assert len(ENGINES) >= 20
    assert sum(engine.frozen for engine in ENGINES.values()) >= 8
