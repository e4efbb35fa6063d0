"""The command does not import heavy libraries: imports are asserted, times are printed."""

import re
import subprocess
import sys

import pytest

HEAVY = {"torch", "ray", "numpy", "transformers", "vllm", "megatron", "jax", "tensorflow"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["list-backends"],
        ["list-backends", "--all", "--json"],
        ["list-plugins"],
        ["doctor"],
        ["--help"],
        ["--version"],
        ["check", "--help"],
    ],
)
def test_it_imports_none_of_the_heavy_libraries(arguments):
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "rlcore_cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    lines = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert "rlcore_cli" in imported
    assert not imported & HEAVY


@pytest.mark.parametrize("command", [["train"], ["validate"], ["data", "show"], ["explain", "grpo.seed", "--config"]])
def test_a_mistake_in_a_config_is_reported_without_heavy_libraries(tmp_path, command):
    (tmp_path / "config.yaml").write_text("grpo: {sed: 1}\n")
    code = "import sys\nfrom rlcore_cli.main import main\ntry:\n    main()\nfinally:\n    print(sorted(sys.modules))"
    command = [sys.executable, "-c", code, *command, str(tmp_path / "config.yaml")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (result.returncode, "Did you mean 'seed'?" in result.stderr) == (2, True)
    assert not HEAVY & set(re.findall(r"'(\w+)'", result.stdout))


def test_transformers_is_imported_by_the_parts_of_a_run_only():
    code = "import sys, rl_train.launch.train; print('torch' in sys.modules, 'transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert result.stdout == "True False\n"


def test_the_lists_import_neither_pydantic_nor_a_table_library():
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(sorted({'pydantic', 'rich', 'yaml', 'omegaconf'} & set(sys.modules))))\n"
        "sys.argv = ['rlcore', 'list-backends']\n"
        "from rlcore_cli.main import main\n"
        "main()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_the_cost_of_list_backends_is_printed(capsys):
    code = (
        "import atexit, time\n"
        "atexit.register(lambda: print(f'CPU seconds: {time.process_time():.3f}'))\n"
        "import sys; sys.argv = ['rlcore', 'list-backends']\n"
        "from rlcore_cli.main import main\n"
        "main()\n"
    )
    costs = []
    for _ in range(5):
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
        costs.append(float(result.stdout.splitlines()[-1].partition(": ")[2]))
    with capsys.disabled():
        print(f"\nrlcore list-backends: {min(costs):.3f} s of CPU, the least of {len(costs)} fresh interpreters")
    assert len(costs) == 5


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_missing_config_is_reported_before_anything_is_imported(command, tmp_path):
    code = (
        "import atexit, sys\n"
        "heavy = {'torch', 'ray', 'numpy', 'transformers', 'rl_train.assembly'}\n"
        "atexit.register(lambda: print(sorted(heavy & set(sys.modules))))\n"
        f"sys.argv = ['rlcore', {command!r}, 'nope.yaml', 'model=x']\n"
        "from rlcore_cli.main import main\n"
        "main()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert result.returncode == 2
    assert "nope.yaml does not exist" in result.stderr
    assert result.stdout.splitlines()[-1] == "[]"
