"""`rlcore new-plugin`: generated plugins are formatted, installed and ready; in `test-full` they pass the kit and train.

So do the plugins that an earlier version has generated.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from keep_plugins import KEPT, NAMES, generated

from rl_core.plugins.manager import discover
from rlcore_cli.new_plugin.scaffold import PLUGIN_KINDS, plugin_files

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "examples"
BOTH = ("--kind", "policy", "--kind", "generation")
TRAINING = [option for option, kind in PLUGIN_KINDS.items() if kind.trains]
ADDED_PROMISE = "test_unused_tokens_have_probability_0"
"""The policy that an earlier version has generated does not have it."""


@pytest.fixture
def generate(rlcore, tmp_path):
    """Run the command; returns the folder of the plugin."""

    def run(option):
        code, output = rlcore("new-plugin", NAMES[option], "--kind", option, folder=tmp_path)
        assert code == 0, output
        return tmp_path / f"rlcore-{NAMES[option].replace('_', '-')}"

    return run


def install(site, folder):
    """Copy a plugin as pip would install it: its package, and the metadata in its pyproject.toml."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    [package] = (folder / "src").iterdir()
    shutil.copytree(package, site.folder / package.name)
    site.write_metadata(
        project["name"],
        version=project["version"],
        entry_points=project["entry-points"]["rl_core.plugins"],
        requires=project["dependencies"],
    )


def kept():
    """The files of the plugins that were kept at the first release of this minor version."""
    with zipfile.ZipFile(KEPT) as archive:
        return {path: archive.read(path).decode() for path in archive.namelist()}


def write(files, folder):
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize("files", [generated, kept])
def test_every_kind_of_plugin_is_ready_and_its_targets_can_be_imported(site, tmp_path, monkeypatch, files):
    write(files(), tmp_path)
    for option in PLUGIN_KINDS:
        install(site, tmp_path / option)
    monkeypatch.syspath_prepend(site.folder)
    ready = [plugin for plugin in discover().plugins if plugin.name in NAMES.values() and plugin.status == "ready"]
    assert sorted(plugin.name for plugin in ready) == sorted(NAMES.values())
    for _, component in (each for plugin in ready for each in plugin.components):
        assert callable(component.load())
        assert (component.load_config() is None) == (component.config is None)


def test_a_policy_and_an_engine_of_one_plugin_train_three_steps_with_another_tokenizer(
    site, generate, monkeypatch, rlcore, tmp_path
):
    code, output = rlcore("new-plugin", "pair", *BOTH, "--distribution", "rl-backends-pair", folder=tmp_path)
    assert code == 0, output
    folder = tmp_path / "rl-backends-pair"
    install(site, folder)
    install(site, generate("weight-transport"))
    monkeypatch.syspath_prepend(site.folder)
    shutil.copytree(MODELS / "addition" / "model", tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    changes = [
        f"policy.model_name={tmp_path / 'model'}",
        f"++policy.tokenizer.name={MODELS / 'addition' / 'model'}",
        '++policy.generation.stop_strings=["\\n"]',  # the engine needs the tokenizer for them
        f"++policy.generation.refit_transport={NAMES['weight-transport']}",
    ]
    code, output = rlcore("train", "train.yaml", *changes, folder=folder)
    assert code == 0, output
    rows = steps_of(folder / "runs" / "pair")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["refit/bytes"] > 4e6 for row in rows)  # the transport moved the weights, about 1.2 million float32 numbers
    assert max(row["agreement/mean"] for row in rows) < 1e-5


def test_an_environment_a_loss_a_dataset_and_a_logger_are_one_plugin_that_trains_three_steps(
    site, monkeypatch, rlcore, tmp_path
):
    kinds = ("tool-environment", "loss", "dataset", "logger")
    code, output = rlcore("new-plugin", "shop", *(text for kind in kinds for text in ("--kind", kind)), folder=tmp_path)
    assert code == 0, output
    folder = tmp_path / "rlcore-shop"
    install(site, folder)
    monkeypatch.syspath_prepend(site.folder)
    code, output = rlcore("train", "train.yaml", f"policy.model_name={MODELS / 'tools' / 'model'}", folder=folder)
    assert code == 0, output
    assert [row["step"] for row in steps_of(folder / "runs" / "shop")] == [1, 2, 3]
    assert (folder / "runs" / "shop" / "metrics.csv").read_text().startswith("step,reward/mean,loss")


def steps_of(run_folder):
    """The metrics of the steps that trained."""
    rows = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "grad_norm" in row]


@pytest.mark.slow
def test_generated_code_is_formatted_and_has_no_open_tasks(generate, tmp_path):
    several = plugin_files("acme-all", "tool-environment", "dataset", "loss", "logger", "generation", "policy")
    write(several, tmp_path / "all")
    files = [*several.items()]
    for option, name in NAMES.items():
        generate(option)
        files += plugin_files(name, option).items()
    for path, text in files:
        assert "TODO" not in text, path
        assert "{{ " not in text, path
    ruff = [sys.executable, "-m", "ruff"]
    rules = ["--isolated", "--no-cache", "--line-length", "128"]
    checked = [*ruff, "check", *rules, "--select", "E,F,I,UP,B,SIM,C4,PT", tmp_path]
    for command in (checked, [*ruff, "format", *rules, "--check", tmp_path]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["Acme", "9lives", "acme.rl", "acme rl", "acme_", "a--b", "", "../acme", "äcme"])
def test_an_invalid_name_is_refused(rlcore, tmp_path, name):
    code, output = rlcore("new-plugin", name, "--kind", "loss", folder=tmp_path)
    assert code == 2
    assert "is not a valid plugin name" in output
    assert "Traceback" not in output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "option", "reason"),
    [
        ("grpo", "loss", "registers the loss 'grpo'"),
        ("math", "session-environment", "registers the environment 'math'"),
        ("cli", "loss", "would replace rlcore_cli"),
        ("train", "command", "has a command 'train'"),
        ("acme", "enviroment", "There is no kind 'enviroment'. Did you mean 'environment'?"),
        ("acme", "environment --kind agent", "both register the environment of that name"),
        ("hf", "generation --kind policy", "registers the policy backend 'hf'"),
        ("acme", "policy --distribution rl-backends-hf", "would replace rl_backends_hf, which is installed"),
        ("acme", "policy --distribution rl/acme", "'rl/acme' is not a valid name of a distribution"),
    ],
)
def test_names_that_are_taken_and_wrong_kinds_are_refused(rlcore, tmp_path, name, option, reason):
    code, output = rlcore("new-plugin", name, "--kind", *option.split(), folder=tmp_path)
    assert (code, list(tmp_path.iterdir())) == (2, [])
    assert reason in output


def test_an_existing_folder_is_refused_and_stays_as_it_is(rlcore, tmp_path):
    (tmp_path / "rlcore-acme").mkdir()
    (tmp_path / "rlcore-acme" / "notes.txt").write_text("mine")
    code, output = rlcore("new-plugin", "acme", "--kind", "loss", folder=tmp_path)
    assert code == 2
    assert "rlcore-acme exists" in output
    assert [path.name for path in (tmp_path / "rlcore-acme").iterdir()] == ["notes.txt"]


def test_names_with_several_words_become_packages_and_classes():
    files = plugin_files("long-sums", "environment")
    assert "src/rlcore_long_sums/environment.py" in files
    assert "class LongSumsEnvironment(" in files["src/rlcore_long_sums/environment.py"]
    project = tomllib.loads(files["pyproject.toml"])["project"]
    assert project["name"] == "rlcore-long-sums"
    assert project["entry-points"]["rl_core.plugins"] == {"long-sums": "rlcore_long_sums.plugin"}


def test_the_command_and_its_templates_have_at_most_1100_lines():
    source = ROOT / "cli" / "src" / "rlcore_cli" / "new_plugin"
    assert sum(len(path.read_text().splitlines()) for path in source.rglob("*") if path.suffix in (".py", ".j2")) <= 1100


@pytest.fixture(scope="module", params=[generated, kept])
def installed(request, tmp_path_factory):
    """All kinds of plugins, built as wheels and installed outside of the repository: their folders, and how to run there."""
    folder = tmp_path_factory.mktemp("plugins")
    write(request.param(), folder)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index"]
    command = [*pip, "--no-build-isolation", "--target", folder / "site", *(folder / option for option in NAMES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    variables = {key: value for key, value in os.environ.items() if not key.startswith("RLCORE_")}
    path = os.pathsep.join(filter(None, [str(folder / "site"), os.environ.get("PYTHONPATH")]))
    variables |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RLCORE_STRICT_PLUGINS": "1"}

    def run(option, *command):
        return subprocess.run(
            [sys.executable, "-m", *command],
            cwd=folder / option,
            env=variables,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )

    return run, folder


def promises_of(request):
    """Arguments of pytest that leave out the promises that the kit has gained since a plugin was kept."""
    return ["-k", f"not {ADDED_PROMISE}"] if request.node.callspec.params["installed"] is kept else []


@pytest.mark.full("a test here imports every component; tests/repo/test_wheels.py installs a plugin from a wheel")
@pytest.mark.parametrize("option", PLUGIN_KINDS)
def test_a_generated_plugin_passes_its_own_tests(installed, option, request):
    run, _ = installed
    done = run(option, "pytest", "-q", "-p", "no:cacheprovider", *promises_of(request))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "promises kept" in done.stdout


@pytest.mark.full("variants of the run of a policy, an engine and a transport")
@pytest.mark.parametrize("option", TRAINING)
def test_a_generated_plugin_trains_three_steps(installed, option):
    run, folder = installed
    # Tools need a model whose chat template shows functions.
    model = MODELS / ("tools" if option == "tool-environment" else "addition") / "model"
    done = run(option, "rlcore_cli.main", "train", "train.yaml", f"policy.model_name={model}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["step"] for row in steps_of(folder / option / "runs" / NAMES[option])] == [1, 2, 3]


@pytest.mark.full("variant of the conformance tests in one process")
@pytest.mark.ray
@pytest.mark.parametrize("option", ["policy", "generation"])
def test_a_generated_backend_passes_its_own_tests_with_workers_over_ray(installed, option, request):
    run, _ = installed
    done = run(option, "pytest", "-q", "-p", "no:cacheprovider", "--ray", *promises_of(request))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full("variant of the runs in one process")
@pytest.mark.ray
def test_a_generated_policy_and_engine_train_on_two_ranks_and_resume(installed):
    run, folder = installed
    changes = [
        f"policy.model_name={MODELS / 'addition' / 'model'}",
        f"policy.generation.backend={NAMES['generation']}",
        "cluster.backend=ray",
        "++cluster.workers_per_node=2",
        "checkpointing.enabled=true",
        "logger.run_name=two_ranks",
    ]
    done = run("policy", "rlcore_cli.main", "train", "train.yaml", *changes)
    assert done.returncode == 0, done.stdout + done.stderr
    done = run("policy", "rlcore_cli.main", "train", "train.yaml", *changes, "grpo.max_num_steps=5")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = steps_of(folder / "policy" / "runs" / "two_ranks")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert max(row["agreement/mean"] for row in rows) < 1e-5
