"""`rlcore validate`: exit code 0 and a summary, or 2 and every error with its line; never a traceback."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command_line import rlcore
from typer.testing import CliRunner

from rl_core.errors import RLCoreError
from rlcore_cli.main import app

EXAMPLES = Path(__file__).parents[2] / "examples"
GRPO = EXAMPLES / "grpo_addition.yaml"


def test_a_valid_config_is_summed_up():
    result = rlcore("validate", GRPO, "grpo.max_num_steps=7", "cluster.workers_per_node=2")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == f"{GRPO} is valid"
    assert lines[1] == "  algorithm   grpo, 7 steps, loss clipped_pg"
    assert lines[-1] == "  cluster     ray, 1 x 2 policy ranks"


def test_a_wrong_config_lists_every_mistake_and_ends_with_2(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(f"defaults: {GRPO}\ngrpo:\n  seed: x\npolicy:\n  precison: float32\n")
    result = rlcore("validate", config, "cluster.num_nodes=0")
    assert (result.returncode, result.stdout) == (2, "")
    lines = result.stderr.splitlines()
    assert lines[:4] == [
        f"{config} has 3 errors:",
        f"{config}:3:9: grpo.seed: must be a whole number; found 'x'.",
        f"{config}:5:3: policy.precison: policy has no key 'precison'. Did you mean 'precision'?",
        "override #1 `cluster.num_nodes=0`: cluster.num_nodes: must be a whole number, 1 or more; found 0.",
    ]
    assert len(lines) == 5
    assert re.match(r"Because of these errors, \d+ checks could not run; --json lists them\.", lines[4])


def test_a_missing_file_is_a_one_line_error():
    result = rlcore("validate", EXAMPLES / "grpo_adition.yaml")
    assert result.returncode == 2
    assert result.stderr.splitlines()[1:] == [
        f"File {EXAMPLES / 'grpo_adition.yaml'} does not exist. Did you mean {EXAMPLES / 'grpo_addition.yaml'}?"
    ]


def test_errors_can_be_printed_as_json():
    result = rlcore("validate", GRPO, "--json", "grpo.seed=x")
    assert result.returncode == 2
    assert json.loads(result.stdout) == {
        "valid": False,
        "errors": [
            {
                "location": "override #1 `grpo.seed=x`",
                "file": None,
                "line": None,
                "column": None,
                "key": "grpo.seed",
                "message": "must be a whole number; found 'x'.",
            }
        ],
        "not_checked": [],
    }


def test_the_resolved_config_can_be_printed_as_json():
    report = json.loads(rlcore("validate", GRPO, "--json").stdout)
    assert (report["valid"], report["config"]["policy"]["generation"]["temperature"]) == (True, 1.0)


def test_the_resolved_config_is_yaml_with_origins(tmp_path):
    text = rlcore("validate", GRPO, "--resolved", "policy.precision=bfloat16").stdout
    assert yaml.safe_load(text) == {
        **json.loads(rlcore("validate", GRPO, "--json", "policy.precision=bfloat16").stdout)["config"]
    }
    line = next(line for line in text.splitlines() if "precision: bfloat16" in line)
    assert line.endswith("# override #1 `policy.precision=bfloat16`")


def test_it_imports_none_of_the_heavy_libraries():
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(sorted({'torch', 'ray', 'numpy', 'transformers'} & set(sys.modules))))\n"
        f"sys.argv = ['rlcore', 'validate', {str(GRPO)!r}]\n"
        "from rlcore_cli.main import main\n"
        "main()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("seed", range(40))
def test_a_mutated_config_ends_with_0_or_2_and_never_with_a_traceback(tmp_path, seed):
    rng = random.Random(seed)
    text = GRPO.read_text()
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text))
        text = (
            text[:at]
            + rng.choice(["", "\t", ":", "{", "é", "\0", "- ", "x: 1\n", "${", "'", "*a"])
            + text[at + rng.randint(0, 9) :]
        )
    config = tmp_path / "config.yaml"
    config.write_text(text.replace("addition/model", str(EXAMPLES / "addition/model")))
    result = CliRunner().invoke(app, ["validate", str(config)])
    # The mutations also reach errors that only `main` prints; a RLCoreError is one of those.
    assert result.exit_code in (0, 2) or isinstance(result.exception, RLCoreError), result.exception
    assert "Traceback" not in result.output


def test_a_binary_file_and_a_folder_end_with_2_in_the_real_command(tmp_path):
    binary = tmp_path / "model.gguf"
    binary.write_bytes(b"GGUF\x03\x00\xff\xfe" * 100)
    for path in (binary, tmp_path):
        result = rlcore("validate", path)
        assert result.returncode == 2
        assert "Traceback" not in result.stderr
