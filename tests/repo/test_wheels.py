"""`make dist` builds every distribution, and the wheels work outside the repository.

No test needs a network. The fresh environments see the third-party libraries of the environment that runs the tests through a
.pth file; our own distributions are hidden there and can only come from the wheels, with pip's ordinary resolution.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import tomllib
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]["members"]
NAMES = {package: tomllib.loads((ROOT / package / "pyproject.toml").read_text())["project"]["name"] for package in PACKAGES}
STEPS = ["grpo.max_num_steps=2", "grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=2", "grpo.val_at_start=false"]
STEPS += [
    "cluster.backend=in_process",
    "grpo.val_period=0",
    "grpo.val_batch_size=8",
    "data.validation.num_samples=8",
    "data.train.num_samples=100",
]


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder of the sdists and wheels that `make dist` builds with the tools of this environment."""
    folder = tmp_path_factory.mktemp("dist")
    # --old-file: the environment is the one that runs the tests, so make must not install another.
    command = ["make", "--old-file", ".venv/.installed-dev", "dist", f"BIN={Path(sys.executable).parent}", f"DIST={folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def third_party(tmp_path_factory):
    """A folder of links to everything installed for the tests except our own distributions, which would hide the wheels."""
    folder = tmp_path_factory.mktemp("third_party")
    modules = {source.name for package in PACKAGES for source in (ROOT / package / "src").iterdir()}
    ours = re.compile(rf"({'|'.join(modules | {name.replace('-', '_') for name in NAMES.values()})})\b(?!_)")
    parent = next(Path(entry) for entry in sys.path if entry.endswith("site-packages"))
    for entry in parent.iterdir():
        if not ours.match(entry.name) and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return folder


def clean_variables():
    """The environment variables without those that lead Python or pip to anything but the fresh environment."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_", "VIRTUAL_ENV", "MAKE"))}
    return kept | {"PIP_CONFIG_FILE": os.devnull}


def run(python, cwd, *arguments):
    return subprocess.run([python, *arguments], cwd=cwd, env=clean_variables(), capture_output=True, text=True, check=False)


def install(folder, requirement, dist, third_party):
    """Create a fresh environment, install the requirement from the wheels alone, and return its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    [site] = (folder / "lib").glob("python*/site-packages")
    (site / "third_party.pth").write_text(f"{third_party}\n")
    python = folder / "bin" / "python"
    wheels = ["--no-index", "--find-links", dist, "--only-binary", ":all:"]
    done = run(python, folder, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wheels, requirement)
    assert done.returncode == 0, done.stderr
    return python


@pytest.fixture(scope="module")
def environment(tmp_path_factory, dist, third_party):
    """A fresh environment with `rlcore[all]`."""
    folder = tmp_path_factory.mktemp("all")
    return install(folder / "env", "rlcore[all]", dist, third_party), folder


@pytest.fixture(scope="module")
def small_environment(tmp_path_factory, dist, third_party):
    """A fresh environment with `rlcore[hf,envs]`."""
    folder = tmp_path_factory.mktemp("hf")
    return install(folder / "env", "rlcore[hf,envs]", dist, third_party), folder


@pytest.fixture(scope="module")
def metadata(dist):
    """The metadata of each wheel, by the name of its distribution."""
    found = {}
    for wheel in dist.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            message = message_from_string(archive.read(name).decode())
        found[message["Name"]] = message
    return found


def own_requirements(message):
    """The requirements of a wheel on our distributions."""
    requirements = map(Requirement, message.get_all("Requires-Dist"))
    return [requirement for requirement in requirements if requirement.name in NAMES.values()]


@pytest.mark.slow
def test_make_dist_builds_a_wheel_and_an_sdist_of_every_distribution(dist, metadata):
    assert sorted(metadata) == sorted(NAMES.values())
    version = metadata["rlcore"]["Version"]
    names = [name.replace("-", "_") for name in NAMES.values()]
    expected = [f"{name}-{version}{ending}" for name in names for ending in (".tar.gz", "-py3-none-any.whl")]
    assert sorted(path.name for path in dist.iterdir() if path.name != ".gitignore") == sorted(expected)


def test_our_distributions_require_compatible_versions_of_each_other(metadata):
    [version] = {message["Version"] for message in metadata.values()}
    pin = f"~={version.rsplit('.', 1)[0]}.0"
    found = {(name, str(own.specifier)) for name, message in metadata.items() for own in own_requirements(message)}
    assert found == {(name, pin) for name in metadata if name != "rl-core"}


def test_extras_of_the_command_install_backends_and_environments(metadata):
    message = metadata["rlcore"]
    extras = {
        extra: {own.name for own in own_requirements(message) if own.marker and own.marker.evaluate({"extra": extra})}
        for extra in message.get_all("Provides-Extra")
    }
    assert {"hf", "vllm", "megatron", "envs", "all"} <= set(extras)
    assert extras["hf"] == {"rl-backends-hf"}
    assert extras["vllm"] == {"rl-backends-vllm"}
    assert extras["openai"] == {"rl-backends-openai"}
    assert extras["megatron"] == {"rl-backends-megatron"}
    assert extras["envs"] == {"rl-envs"}
    assert extras["serve"] == {"rl-serve"}
    assert extras["all"] == {name for name in metadata if name.startswith(("rl-backends-", "rl-envs", "rl-serve"))} - {
        "rl-backends-base"  # backends require it
    }


def test_metadata_states_license_platform_and_tested_python_versions(metadata):
    for name, message in metadata.items():
        assert message["License-Expression"] == "Apache-2.0", name
        assert message.get_all("License-File") == ["LICENSE"], name
        assert message["Requires-Python"] == "<3.14,>=3.11", name
        classifiers = message.get_all("Classifier")
        assert "Operating System :: POSIX :: Linux" in classifiers, name
        versions = [entry for entry in classifiers if re.search(r"Python :: 3\.", entry)]
        assert versions == [f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)], name


def test_sdists_and_wheels_contain_the_license(dist):
    text = (ROOT / "LICENSE").read_bytes()
    assert b"Apache License" in text
    for wheel in dist.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            [name] = [name for name in archive.namelist() if name.endswith("/licenses/LICENSE")]
            assert archive.read(name) == text, wheel.name
    for sdist in dist.glob("*.tar.gz"):
        with tarfile.open(sdist) as archive:
            assert archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/LICENSE").read() == text, sdist.name


@pytest.mark.slow
def test_the_command_trains_from_the_wheels_of_the_core_hf_and_envs(small_environment):
    python, folder = small_environment
    project = folder / "project"
    shutil.copytree(ROOT / "examples" / "addition" / "model", project / "addition" / "model")
    shutil.copy(ROOT / "examples" / "grpo_addition.yaml", project)
    done = run(python.with_name("rlcore"), project, "train", "grpo_addition.yaml", *STEPS)
    assert done.returncode == 0, done.stdout + done.stderr
    [run_folder] = (project / "runs").iterdir()
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "reward/mean" in row] == [1, 2]
    assert str(ROOT) not in done.stdout + done.stderr


def test_backends_that_were_not_asked_for_are_not_installed(small_environment):
    python, folder = small_environment
    done = run(python.with_name("rlcore"), folder, "list-backends", "--json")
    assert done.returncode == 0, done.stderr
    found = {(row["kind"], row["name"]): row["status"] for row in json.loads(done.stdout)}
    assert found[("policy", "hf")] == "ready"
    assert found[("policy", "megatron")] == "not installed"
    assert found[("generation", "vllm")] == "not installed"


@pytest.mark.slow
def test_the_installed_wheels_are_found_and_ready(environment):
    python, folder = environment
    done = run(python, folder, "-m", "rlcore_cli.main", "list-backends", "--json")
    assert done.returncode == 0, done.stderr
    found = {(row["kind"], row["name"]): row["status"] for row in json.loads(done.stdout)}
    assert found[("policy", "hf")] == "ready"
    assert found[("generation", "hf")] == "ready"
    assert found[("policy", "megatron")] == "ready"
    assert found[("generation", "vllm")] == "ready"


def test_a_wheel_holds_every_file_of_its_source_and_no_other(dist):
    for package, name in NAMES.items():
        source = ROOT / package / "src"
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "."]
        listed = subprocess.run(command, cwd=source, check=True, capture_output=True, text=True).stdout.splitlines()
        [module] = source.iterdir()
        [wheel] = dist.glob(f"{name.replace('-', '_')}-*.whl")
        held = [name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(f"{module.name}/")]
        # A tracked file that was just deleted is still listed.
        assert sorted(held) == sorted(name for name in listed if (source / name).exists())


def test_the_wheels_are_imported_from_the_environment_not_from_the_repository(environment):
    python, folder = environment
    done = run(
        python, folder, "-c", "import rl_core, rl_backends_hf, rl_envs, rlcore_cli as c; print(rl_core.__file__, c.__file__)"
    )
    assert done.returncode == 0, done.stderr
    assert str(ROOT) not in done.stdout
    assert str(folder) in done.stdout


def test_a_config_is_validated_by_the_wheels_alone(environment):
    python, folder = environment
    done = run(python, folder, "-m", "rlcore_cli.main", "validate", str(ROOT / "examples" / "grpo_addition.yaml"))
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.mark.full("a test here compares the files of every wheel; the tests of a distribution import its components")
def test_every_component_of_the_wheels_can_be_imported(environment):
    python, folder = environment
    done = run(python, folder, "-m", "rlcore_cli.main", "doctor", "--deep")
    assert done.returncode == 0, done.stderr + done.stdout


ACME = {
    "pyproject.toml": """
        [build-system]
        requires = ["hatchling"]
        build-backend = "hatchling.build"

        [project]
        name = "rl-backends-acme"
        version = "2.1"
        dependencies = ["rl-backends-base"]

        [project.entry-points."rl_core.plugins"]
        acme = "rl_backends_acme.plugin"
    """,
    "src/rl_backends_acme/__init__.py": "",
    "src/rl_backends_acme/plugin.py": """
        from rl_core.plugins import Component, hookimpl


        @hookimpl
        def rlcore_policies():
            return [Component("acme", target="rl_backends_acme.policy:AcmePolicy", summary="A policy of Acme")]
    """,
    "src/rl_backends_acme/policy.py": """
        from rl_backends_base import DistributedPolicy
        from rl_core.data import BatchedDataDict
        from rl_core.interfaces import PolicyInterface
        from rl_core.weights.source import WeightSource


        class AcmePolicy(DistributedPolicy):
            pass
    """,
}
AS_ITS_AUTHOR = """
import sys
from rl_core.interfaces import PolicyInterface
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
print(Registry(discover(strict=True)).find("policy", "acme").load(expect=PolicyInterface).__name__)
assert not any(name.partition(".")[0] in ("rl_train", "rlcore_cli", "rl_envs", "rl_backends_hf") for name in sys.modules)
"""


@pytest.mark.slow
def test_a_third_party_backend_needs_the_core_and_the_base_of_backends_alone(tmp_path, dist, third_party):
    for name, text in ACME.items():
        (tmp_path / "acme" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "acme" / name).write_text(textwrap.dedent(text))
    wheels = tmp_path / "wheels"
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", wheels, tmp_path / "acme"]
    done = subprocess.run(build, capture_output=True, text=True, check=False, env=clean_variables())
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("rl_core", "rl_backends_base"):
        shutil.copy(next(dist.glob(f"{name}-*.whl")), wheels)
    python = install(tmp_path / "env", "rl-backends-acme", wheels, third_party)
    listed = run(python, tmp_path, "-m", "rl_core.plugins")
    assert listed.returncode == 0, listed.stderr
    assert "acme  rl-backends-acme 2.1  ready" in listed.stdout
    assert "policy backend     acme" in listed.stdout
    assert {line.split()[0] for line in listed.stdout.splitlines() if not line.startswith(" ")} == {"acme", "core"}
    loaded = run(python, tmp_path, "-c", AS_ITS_AUTHOR)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout == "AcmePolicy\n"
