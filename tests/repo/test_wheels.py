"""Each distribution as a wheel that works outside the repository."""

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("rl_core", "rl_backends_hf", "rl_backends_megatron", "rl_backends_vllm", "rl_envs", "cli")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A fresh environment with our wheels alone; third-party libraries are seen through the parent's."""
    folder = tmp_path_factory.mktemp("wheels")
    for package in PACKAGES:
        subprocess.run(
            [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder / "dist", ROOT / package],
            check=True,
            capture_output=True,
        )
    venv.create(folder / "env", with_pip=False, symlinks=True)
    python = folder / "env" / "bin" / "python"
    [site] = (folder / "env" / "lib").glob("python*/site-packages")
    wheels = sorted((folder / "dist").glob("*.whl"))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, *wheels],
        check=True,
    )
    parent = next(Path(entry) for entry in sys.path if entry.endswith("site-packages"))
    for entry in parent.iterdir():
        # Everything but our own editable installs, which would shadow the wheels.
        ours = entry.name.startswith(("rl_core", "rl_backends", "rl_envs", "rlcore", "_rl", "_editable"))
        if not ours and not (site / entry.name).exists() and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    return python, folder


def run(python, cwd, *arguments):
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run([python, *arguments], cwd=cwd, env=clean, capture_output=True, text=True, check=False)


def test_the_installed_wheels_are_found_and_ready(environment):
    python, folder = environment
    done = run(python, folder, "-m", "rlcore_cli.main", "list-backends", "--json")
    assert done.returncode == 0, done.stderr
    found = {(row["kind"], row["name"]): row["status"] for row in json.loads(done.stdout)}
    assert found[("policy", "hf")] == "ready"
    assert found[("generation", "hf")] == "ready"
    assert found[("policy", "megatron")] == "ready"
    assert found[("generation", "vllm")] == "ready"
    assert len(list((folder / "dist").glob("*.whl"))) == len(PACKAGES)


def test_a_wheel_holds_every_file_of_its_source_and_no_other(environment):
    _, folder = environment
    for package in PACKAGES:
        source = ROOT / package / "src"
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "."]
        listed = subprocess.run(command, cwd=source, check=True, capture_output=True, text=True).stdout.splitlines()
        [module] = source.iterdir()
        [wheel] = (folder / "dist").glob(f"{'rlcore' if package == 'cli' else package}-*.whl")
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


def test_every_component_of_the_wheels_can_be_imported(environment):
    python, folder = environment
    done = run(python, folder, "-m", "rlcore_cli.main", "doctor", "--deep")
    assert done.returncode == 0, done.stderr + done.stdout
