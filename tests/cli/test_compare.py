"""`rlcore compare`: better runs and differences, on the terminal, as JSON and as a page."""

import json
import re
import subprocess
import sys

import pytest
from command_line import rlcore

from rlcore_cli.compare import better_runs, compare_runs
from rlcore_cli.report.run_folder import read_run_folder


@pytest.fixture
def two(write_run, tmp_path):
    accuracies = {"a": [0.2, 0.9, 0.6], "b": [0.1, 0.5, 0.7]}
    configs = {"a": {"grpo": {"max_num_steps": 3, "seed": 3}, "policy": {}}}
    configs["b"] = {"grpo": {"max_num_steps": 3, "seed": 4}, "policy": {"lr": 0.1}}
    for name, values in accuracies.items():
        write_run(
            tmp_path / name,
            steps=3,
            metrics=lambda step, values=values: {"validation/accuracy": values[step - 1], "validation/loss": 1.0 / step},
            config={
                "grpo": {"max_num_steps": 3, "seed": 3 if name == "a" else 4},
                "policy": {"lr": 0.1} if name == "b" else {},
            },
            environment={"python": "3.11", "distributions": {"torch": "2.13" if name == "a" else "2.14"}},
        )
    return tmp_path / "a", tmp_path / "b"


def metrics(*folders):
    comparison = compare_runs([read_run_folder(folder) for folder in folders])
    return comparison, {found.metric: found for found in comparison.metrics}


def test_the_final_and_the_best_value_of_each_metric_are_found_with_their_steps(two):
    _, by_name = metrics(*two)
    accuracy = by_name["validation/accuracy"]
    assert (accuracy.finals, accuracy.bests) == (((0.6, 3), (0.7, 3)), ((0.9, 2), (0.7, 3)))
    assert better_runs(accuracy, ("A", "B")) == "final: B, best: A"
    assert better_runs(by_name["validation/loss"], ("A", "B")) == "equal"
    assert by_name["validation/loss"].bests == ((1 / 3, 3), (1 / 3, 3))


def test_a_metric_without_a_direction_has_no_better_run(two):
    _, by_name = metrics(*two)
    assert by_name["entropy/sampled"].bests is None
    assert better_runs(by_name["entropy/sampled"], ("A", "B")) == ""


def test_only_what_differs_in_config_and_versions_is_listed(two):
    comparison, _ = metrics(*two)
    assert comparison.settings == (("grpo.seed", ("3", "4")), ("policy", ("{}", "—")), ("policy.lr", ("—", "0.1")))
    assert comparison.versions == (("torch", ("2.13", "2.14")),)


def test_a_metric_missing_in_one_run_is_listed_but_not_compared(two, write_run, tmp_path):
    other = write_run(tmp_path / "c", steps=2)
    comparison, by_name = metrics(two[0], other)
    assert comparison.not_shared == ("validation/accuracy", "validation/loss")
    assert "validation/accuracy" not in by_name


def test_runs_of_different_length_are_compared_at_the_last_common_step(write_run, tmp_path):
    def accuracy(step):
        return {"validation/accuracy": 0.1 * step}

    short = write_run(tmp_path / "short", steps=3, metrics=lambda step: {"validation/accuracy": 0.1 * step + 0.05})
    long = write_run(tmp_path / "long", steps=8, metrics=accuracy)
    comparison, by_name = metrics(short, long)
    found = by_name["validation/accuracy"]
    assert found.step == 3
    assert [step for _, step in found.finals] == [3, 3]
    assert [step for _, step in found.bests] == [3, 3]
    assert better_runs(found, ("A", "B")) == "A", "the longer run is not better because it went on"
    assert len(comparison.notes(comparison.metrics)) == 1
    assert "compared up to the last step that all runs have" in rlcore("compare", short, long).stdout


def test_runs_without_a_common_step_have_no_better_final_value(write_run, tmp_path):
    even = write_run(tmp_path / "even", steps=4, metrics=lambda step: {"validation/accuracy": 0.5} if step % 2 == 0 else {})
    odd = write_run(tmp_path / "odd", steps=4, metrics=lambda step: {"validation/accuracy": 0.6} if step % 2 else {})
    found = metrics(even, odd)[1]["validation/accuracy"]
    assert (found.step, found.finals, found.bests) == (None, ((0.5, 2), (0.6, 3)), ((0.5, 2), (0.6, 1)))
    assert better_runs(found, ("A", "B")) == "best: B"


def test_runs_with_different_validation_periods_are_not_compared_at_the_start(write_run, tmp_path):
    def validated(period, gain):
        return lambda step: {"validation/accuracy": 0.1 + gain * step} if step % period == 1 else {}

    folders = [
        write_run(tmp_path / "a", steps=20, metrics=validated(7, 0.04)),
        write_run(tmp_path / "b", steps=20, metrics=validated(10, 0.01)),
    ]
    found = metrics(*folders)[1]["validation/accuracy"]
    assert (found.step, [step for _, step in found.finals]) == (None, [8, 11])
    assert better_runs(found, ("A", "B")) == "best: A"
    shown = rlcore("compare", *folders).stdout
    assert "0.21 (-0.21) at 11" in shown
    assert "Final values of different steps are shown with their step" in shown


def test_steps_of_metrics_that_the_table_leaves_out_are_not_explained(write_run, tmp_path):
    def timed(remainder):
        return lambda step: {"validation/accuracy": 0.5} | ({"time/data_s": 1.0} if step % 2 == remainder else {})

    folders = [write_run(tmp_path / str(remainder), steps=4, metrics=timed(remainder)) for remainder in (0, 1)]
    for options, told in (((), False), (("--all",), True)):
        shown = rlcore("compare", *folders, *options).stdout
        assert ("time/data_s" in shown, "Final values of different steps" in shown) == (told, told)


def test_a_last_common_step_that_ends_one_of_the_runs_is_compared(write_run, tmp_path):
    folders = [
        write_run(
            tmp_path / str(period),
            steps=9,
            metrics=lambda step, p=period: {"validation/accuracy": 0.5} if step % p == 0 else {},
        )
        for period in (2, 4)
    ]
    assert metrics(*folders)[1]["validation/accuracy"].step == 8


@pytest.mark.parametrize(("first", "second", "words"), [(2e-13, 5e-13, "equal"), (0.3, 0.3000009, "equal"), (0.3, 0.31, "A")])
def test_rounding_noise_makes_no_run_better(write_run, tmp_path, first, second, words):
    folders = [
        write_run(tmp_path / name, steps=2, metrics=lambda step, value=value: {"validation/loss": value})
        for name, value in (("a", first), ("b", second))
    ]
    assert better_runs(metrics(*folders)[1]["validation/loss"], ("A", "B")) == words


def test_three_runs_are_counted_against_the_first(two, write_run, tmp_path):
    third = write_run(tmp_path / "c", steps=3, metrics=lambda step: {"validation/accuracy": 0.7, "validation/loss": 1.0 / step})
    _, by_name = metrics(*two, third)
    assert better_runs(by_name["validation/accuracy"], ("A", "B", "C")) == "final: B and C, best: A"


def test_the_terminal_shows_curves_differences_and_the_table(two):
    result = rlcore("compare", *two)
    assert result.returncode == 0, result.stderr
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert f"A = {two[0]} (3 steps)" in lines
    assert "grpo.seed 3 4" in lines
    assert "validation/accuracy 0.6 0.7 (+0.1) 0.9 0.7 (-0.2) final: B, best: A" in lines
    assert "time/step_s" not in result.stdout
    assert re.search(r"┤.*A", result.stdout)
    assert "time/step_s" in rlcore("compare", *two, "--all").stdout


def test_templates_are_loaded_for_a_page_only(two):
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('jinja2' in sys.modules))\n"
        f"sys.argv = ['rlcore', 'compare', *{[*map(str, two)]}]\n"
        "from rlcore_cli.main import main\n"
        "main()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert result.stdout.splitlines()[-1] == "False"


def test_json_has_the_same_numbers(two):
    printed = json.loads(rlcore("compare", *two, "--json").stdout)
    assert printed["metrics"]["validation/accuracy"] == {
        "better": "higher",
        "compared_at": 3,
        "final": [{"value": 0.6, "step": 3}, {"value": 0.7, "step": 3}],
        "best": [{"value": 0.9, "step": 2}, {"value": 0.7, "step": 3}],
    }
    assert printed["config"]["grpo.seed"] == ["3", "4"]


def test_the_page_draws_one_line_per_run_and_loads_nothing(two, tmp_path):
    page = tmp_path / "out" / "compare.html"
    result = rlcore("compare", *two, "--output", page)
    assert result.returncode == 0, result.stderr
    text = page.read_text()
    [chart] = re.findall(r'<svg [^>]*aria-label="validation/accuracy".*?</svg>', text)
    assert len(re.findall(r"<polyline", chart)) == 2
    assert "final: B, best: A" in text
    assert not re.search(r"https?:|@import|url\(", text)


def test_invalid_comparisons_are_user_errors(two, write_run, tmp_path):
    alone = rlcore("compare", two[0])
    assert alone.returncode == 2
    assert "needs at least two" in alone.stderr
    absent = rlcore("compare", two[0], tmp_path / "nowhere")
    assert (absent.returncode, "nowhere does not exist" in absent.stderr) == (2, True)
    nothing = rlcore("compare", write_run(tmp_path / "n", steps=0), write_run(tmp_path / "m", steps=0, environment=None))
    assert nothing.returncode == 0, nothing.stderr
    assert "The runs have no metric in common." in nothing.stdout
    assert "No differences between the configs." in nothing.stdout
    assert "Versions not compared: no environment.json in B." in nothing.stdout
