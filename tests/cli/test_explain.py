"""`rlcore explain`: a key's meaning, type, bounds, default and reader, and with a config its value and where that is from."""

import subprocess
import sys
from pathlib import Path

import pytest

GRPO = Path(__file__).parents[2] / "examples" / "grpo_addition.yaml"


def explain(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "rlcore_cli.main", "explain", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_key_without_a_config():
    lines = explain("policy.generation.temperature").stdout.splitlines()
    assert lines[:5] == [
        "policy.generation.temperature",
        "  means     Logits are divided by it; training scores tokens at the same temperature.",
        "  type      float",
        "  allowed   a number, more than 0.0",
        "  default   1.0",
    ]
    # Further backends may be installed, which read it as well.
    assert "generation backend hf (rl_backends_hf.generation:HuggingFaceGeneration)" in lines[5]
    assert lines[6] == "  declared  rl_core.config.policy_sections:GenerationConfig"


def test_a_key_in_a_config_says_what_it_holds_and_where_that_is_from():
    lines = explain("policy.max_total_sequence_length", "--config", GRPO).stdout.splitlines()
    number = next(n for n, line in enumerate(GRPO.read_text().splitlines(), 1) if "max_total_sequence_length" in line)
    assert lines[0] == "policy.max_total_sequence_length = 16"
    assert lines[1] == f"  from      {GRPO}:{number}:30"


def test_an_override_is_named_as_the_origin():
    lines = explain("policy.generation.temperature", "policy.generation.temperature=0.7", "--config", GRPO).stdout.splitlines()
    assert lines[:2] == [
        "policy.generation.temperature = 0.7",
        "  from      override #1 `policy.generation.temperature=0.7`",
    ]


def test_a_section_lists_its_keys():
    assert "  num_prompts_per_step" in explain("grpo").stdout
    lines = explain("cluster.deadlines", "--config", GRPO).stdout.splitlines()
    assert lines[:2] == ["cluster.deadlines", "  start_s        600.0   default of DeadlineConfig"]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("policy.temperature", "policy.generation.temperature"),
        ("policy.generation.temprature", "policy.generation.temperature"),
        ("clster", "cluster"),
    ],
)
@pytest.mark.parametrize("config", [(), ("--config", GRPO)])
def test_an_unknown_key_suggests_the_one_that_was_meant(key, meant, config):
    result = explain(key, *config)
    assert result.returncode == 2
    assert result.stderr.endswith(f"there is no key {key}. Did you mean {meant}?\n")


def test_overrides_without_a_config_are_refused():
    result = explain("grpo.seed", "grpo.seed=3")
    assert (result.returncode, "name it with --config" in result.stderr) == (2, True)


def test_the_schema_is_written_to_a_file(tmp_path):
    target = tmp_path / "schema.json"
    command = [sys.executable, "-m", "rlcore_cli.main", "schema", "--output", str(target), "--plugins", "core,hf"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, target.read_text()[:1]) == (0, "{")


def test_the_schema_of_an_unknown_plugin_is_refused():
    command = [sys.executable, "-m", "rlcore_cli.main", "schema", "--plugins", "hff"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, "Did you mean 'hf'?" in result.stderr) == (2, True)
