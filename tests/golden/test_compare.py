"""`tests/golden/compare` finds what differs between two checkouts, and nothing else."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

sys.path.insert(0, str(Path(__file__).parent))

import comparison
import differences
import golden_cases
import recorded_configs
from differences import Difference

from rlcore_cli.main import app

ROOT = Path(__file__).parents[2]


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


STEPS = ({"step": 1, "loss": 0.5, "time/step_s": 1.0, "memory/train_gib": 2.0}, {"step": 2, "loss": 0.25})


def test_equal_files_have_no_differences_whatever_they_measured():
    later = ({**STEPS[0], "time/step_s": 9.0, "memory/train_gib": 3.0}, STEPS[1])
    assert list(differences.compare_rows("metrics.jsonl", lines(*STEPS), lines(*later))) == []
    assert list(differences.compare_rows("m", lines({"loss": float("nan")}), lines({"loss": float("nan")}))) == []


def test_a_changed_metric_is_found_in_its_last_bit_with_its_line_and_name():
    changed = (STEPS[0], {"step": 2, "loss": 0.25 + 2**-54})
    [found] = differences.compare_rows("metrics.jsonl", lines(*STEPS), lines(*changed))
    assert found == Difference("metrics.jsonl:2", "loss", "0.25", "0.25000000000000006")


def test_metrics_and_rows_of_only_one_side_are_found():
    more = (STEPS[0], {**STEPS[1], "kl": None})
    assert list(differences.compare_rows("m", lines(*STEPS), lines(*more))) == [Difference("m:2", "kl", "absent", "null")]
    assert list(differences.compare_rows("m", lines(*STEPS), lines(STEPS[0]))) == [Difference("m:2", "rows", "2", "1")]


def test_values_that_python_calls_equal_differ_if_their_types_do():
    assert [each.key for each in differences.compare_values("", {"a": 1, "b": [1, True]}, {"a": 1.0, "b": [1, 1]})] == [
        "a",
        "b[1]",
    ]


def test_reordered_rows_are_equal_as_sets_but_not_line_by_line():
    reordered = lines(*reversed(STEPS))
    assert list(differences.compare_sets("m", lines(*STEPS), reordered)) == []
    assert [each.key for each in differences.compare_rows("m", lines(*STEPS), reordered)] == ["step", "loss", "step", "loss"]


def test_sets_count_equal_rows_and_compare_only_the_given_columns():
    twice = lines(STEPS[1], STEPS[1])
    [found] = differences.compare_sets("m", twice, lines(STEPS[1]))
    assert (found.old, found.new) == ('{"loss": 0.25, "step": 2}', "absent")
    assert list(differences.compare_sets("m", lines({"a": 1, "b": 2}), lines({"a": 1, "b": 3}), columns=("a",))) == []


def test_texts_differ_at_their_first_different_line():
    assert list(differences.compare_texts("schema", "a\nb\nc", "a\nx\ny")) == [Difference("schema:2", "text", "b", "x")]
    assert list(differences.compare_texts("schema", "a", "a\nb")) == [Difference("schema:2", "lines", "1", "2")]


def test_allowed_differences_are_those_of_a_case_and_a_pattern_of_keys():
    found = [Difference("m:1", key, "1", "2") for key in ("reward/mean", "reward/std", "loss")]
    assert [each.key for each in differences.unexpected("grpo", found, ["grpo:reward/*"])] == ["loss"]
    assert differences.unexpected("dapo", found, ["grpo:*"]) == found
    assert differences.unexpected("dapo", found, ["*:*"]) == []


def test_errors_of_configs_are_compared_by_file_line_and_key_and_never_by_text():
    def result(line, message, key="grpo.seed"):
        return {
            "valid": False,
            "errors": [{"location": "x", "file": "/a/c.yaml", "line": line, "key": key, "message": message}],
        }

    assert list(comparison.compare_findings("test", result(3, "old words"), result(3, "new words"))) == []
    moved = list(comparison.compare_findings("test", result(3, ""), result(4, "")))
    assert [str(each) for each in moved] == [
        "test: c.yaml:3: grpo.seed: error -> absent",
        "test: c.yaml:4: grpo.seed: absent -> error",
    ]
    assert [each.key for each in comparison.compare_findings("test", {"valid": True}, {"exit code": 1})] == ["exit code 1"]


def test_the_summary_of_a_case_has_its_first_difference_and_all_keys():
    found = [Difference("m:2", "loss", "1", "2"), Difference("m:2", "lr", "1", "2"), Difference("m:3", "loss", "1", "2")]
    assert (
        comparison.summary(found, 1) == "differs: m:2: loss: 1 -> 2; 3 differences in 2 keys: loss, lr, 1 allowed differences"
    )
    assert comparison.summary([], 0) == "equal"


def test_an_unknown_case_is_refused_with_the_names_of_all():
    assert comparison.selected(["grpo", "gspo", "sft"], "g*") == ["grpo", "gspo"]
    with pytest.raises(SystemExit, match=r"no case 'grop'\. Cases: grpo"):
        comparison.selected(["grpo"], "grop")


def test_a_recorded_config_is_checked_with_the_files_as_they_were(tmp_path):
    config = tmp_path / "tests" / "config.yaml"
    row = {
        "kind": "validate",
        "folder": str(tmp_path),
        "files": {str(config): "a: 1"},
        "configs": [str(config)],
        "overrides": ["b=2"],
    }
    assert recorded_configs.command_of(row, tmp_path) == (("validate", str(config), "--json", "--", "b=2"), str(tmp_path))
    assert config.read_text() == "a: 1"


WITHOUT_CASES = {
    "doctor": "needs a Ray cluster of several nodes",
    "validate": "the case validate",
    "import-config": "the case import",
    "check-logprobs": "an alias",
    "diagnose": "an alias",
}
"""Commands with `--json` that no case calls, and why."""


def leaves(context):
    """The contexts of all commands, which are imported by it."""
    command = context.command
    for name in command.list_commands(context) if hasattr(command, "commands") else ():
        yield from leaves(command.get_command(context, name).make_context(name, [], parent=context, resilient_parsing=True))
    if not hasattr(command, "commands"):
        yield context


def test_every_command_that_prints_json_has_a_case(tmp_path):
    (tmp_path / "examples").mkdir()
    cases = golden_cases.all_cases(tmp_path)
    called = [command.argv for case in cases for command in case.commands if "--json" in command.argv]
    printing = set()
    for context in leaves(get_command(app).make_context("rlcore", [], resilient_parsing=True)):
        if any("--json" in option.opts for option in context.command.params):
            printing.add(tuple(context.command_path.split()[1:]))
    missing = {names for names in printing if not any(argv[: len(names)] == names for argv in called)}
    assert {" ".join(names) for names in missing} == set(WITHOUT_CASES)


PLANTED = """

def _planted(self, metrics, step, write=JsonlLogger.log_metrics):
    write(self, {**metrics, "loss": metrics["loss"] + 1e-12} if step == 7 else metrics, step)


JsonlLogger.log_metrics = _planted
"""


@pytest.mark.slow
def test_a_checkout_equals_itself_and_a_planted_difference_is_found(tmp_path):
    changed = tmp_path / "changed"
    kept = shutil.ignore_patterns(".*", "tests", "docs", "benchmarks", "__pycache__")
    shutil.copytree(ROOT, changed, ignore=kept)
    with (changed / "rl_train/src/rl_train/metrics/jsonl.py").open("a") as module:
        module.write(PLANTED)

    def compare(*options):
        command = [ROOT / "tests/golden/compare", ROOT, changed, *options]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = compare("--only", "grpo,schema")
    assert done.returncode == 1, done.stdout + done.stderr
    trained, schema, last = done.stdout.splitlines()
    assert trained.startswith("grpo                 differs: runs/run/metrics.jsonl:8: loss: ")
    assert "; " not in trained  # only this one value
    assert schema.startswith("schema               equal")
    assert last == "2 cases, 1 differ"
    assert compare("--only", "grpo", "--allow", "grpo:loss").returncode == 0
