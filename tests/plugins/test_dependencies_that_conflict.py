"""The page about dependencies that conflict: a generated plugin trains with a library that only another interpreter has."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from other_interpreters import make_environment, see_our_packages, site_packages

from rlcore_cli.new_plugin.scaffold import plugin_files

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "dependencies_that_conflict.md").read_text()


def block(language):
    [text] = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    return text


@pytest.fixture
def project(site, tmp_path):
    """A generated policy and engine whose model needs `acme_kernels`, an extra that this interpreter does not have."""
    files = plugin_files("acme", "policy", "generation")
    model = "src/rlcore_acme/model.py"
    files[model] = files[model].replace("from transformers import", "from acme_kernels import")
    assert "acme_kernels" in files[model]
    for path, text in files.items():
        (tmp_path / "rlcore-acme" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "rlcore-acme" / path).write_text(text)
    assert importlib.util.find_spec("acme_kernels") is None
    requires = tomllib.loads(files["pyproject.toml"])["project"]["dependencies"]
    [extra] = tomllib.loads(block("toml"))["project"]["optional-dependencies"].items()
    site.write_metadata(
        "rlcore-acme",
        version="0.1.0",
        entry_points={"acme": "rlcore_acme.plugin"},
        requires=[*requires, *(f'{each}; extra == "{extra[0]}"' for each in extra[1])],
        provides_extras=[extra[0]],
    )
    shutil.copytree(tmp_path / "rlcore-acme" / "src" / "rlcore_acme", site.folder / "rlcore_acme")
    return tmp_path / "rlcore-acme"


def with_the_library(folder):
    """An interpreter with `acme_kernels`."""
    python = see_our_packages(make_environment(folder))
    (site_packages(folder) / "acme_kernels.py").write_text(
        "from transformers import AutoModelForCausalLM as AutoModelForCausalLM\n"
    )
    return python


@pytest.mark.slow
@pytest.mark.ray
def test_policy_and_engine_train_with_the_config_of_the_page_and_a_library_that_the_driver_lacks(site, project):
    with_the_library(project / "venvs" / "acme")
    config = yaml.safe_load((project / "train.yaml").read_text())
    page = yaml.safe_load(block("yaml"))
    config["policy"]["generation"] |= page["policy"].pop("generation")
    config["policy"] |= page["policy"]
    config["policy"]["model_name"] = str(ROOT / "examples" / "addition" / "model")
    config["cluster"] |= page["cluster"]
    (project / "train.yaml").write_text(json.dumps(config))
    run = "import os, sys\nos.chdir(sys.argv.pop(1))\nfrom rlcore_cli.main import main\nmain()\n"
    validated = site.python("-c", run, str(project), "validate", "--deep", "train.yaml")
    assert validated.returncode == 0, validated.stdout + validated.stderr
    trained = site.python("-c", run, str(project), "train", "train.yaml")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    rows = [json.loads(line) for line in (project / "runs" / "acme" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "grad_norm" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert max(row["agreement/mean"] for row in steps) < 1e-5


@pytest.mark.slow
def test_the_driver_finds_nothing_wrong_without_the_library_and_the_kit_runs_with_it(site, project):
    assert site.rlcore("doctor", "acme", "--deep").returncode == 0
    path = os.pathsep.join(filter(None, [str(site.folder), os.environ.get("PYTHONPATH")]))
    for python, code in ((with_the_library(project / "venvs" / "acme"), 0), (Path(sys.executable), 1)):
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", "-k", "TestPolicy"]
        done = subprocess.run(command, cwd=project, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        assert ("No module named 'acme_kernels'" in done.stdout) == (code == 1)
