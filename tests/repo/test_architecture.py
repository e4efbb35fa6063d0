"""The map of the code: its pictures are drawn from today's imports, and it names modules and folders that exist."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


@pytest.fixture(scope="module")
def script():
    specification = importlib.util.spec_from_file_location("make_architecture", ROOT / "docs" / "make_architecture.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_pictures_show_the_imports(script):
    drawn = {path.name: path.read_text() for path in script.FOLDER.glob("*.svg")}
    assert script.pictures() == drawn, "run python docs/make_architecture.py"


def test_every_module_that_the_page_names_exists(script):
    named = set(re.findall(rf"`((?:{'|'.join(script.PACKAGES)})(?:\.\w+)*)`", PAGE))
    assert len(named) > 60
    assert sorted(named - script.import_graph().modules) == []


def test_every_file_that_the_page_names_exists():
    files = re.findall(r"`((?:\w+/)+\w+\.\w+)`", PAGE)
    assert [file for file in files if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize("package", ["rl_core", "rl_train"])
def test_the_page_lists_every_folder_and_no_other(script, package):
    folders = {path.parent.name for path in script.PACKAGES[package].glob("*/__init__.py")}
    table = PAGE.split(f"## Folders of `{package}`")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) == folders
