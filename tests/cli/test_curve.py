"""The curve printed at the end of a run, for complete and damaged metrics.jsonl files."""

import pytest

from rl_core.errors import DataError
from rlcore_cli.curve import draw, read_series
from rlcore_cli.report.run_folder import Curve


def test_a_curve_has_the_steps_of_the_metric_without_a_truncated_last_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 0, "validation/accuracy": 0.25}\n'
        '{"step": 1, "reward/mean": 0.5}\n'
        '{"step": 2, "validation/accuracy": null}\n'
        '{"step": 3, "validation/accuracy": 0.75}\n'
        '{"step": 4, "validation/accu'
    )
    assert read_series(path, "validation/accuracy") == Curve(steps=[0, 3], values=[0.25, 0.75])
    path.write_text('{"step": 4, "validation/accuracy": 0.5}')
    assert read_series(path, "validation/accuracy") == Curve(steps=[], values=[])


def test_a_line_that_is_damaged_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "reward/mean": 0.5}\nnonsense\n{"step": 3, "reward/mean": 0.5}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: invalid JSON"):
        read_series(path, "reward/mean")


def test_the_drawing_has_its_title_and_no_colours():
    drawing = draw([("braille", Curve(steps=[1, 2, 3], values=[0.0, 0.5, 1.0]))], "mean reward")
    assert "mean reward" in drawing
    assert "\x1b" not in drawing


@pytest.mark.parametrize(("columns", "most"), [("40", 40), ("200", 72)])
def test_a_drawing_is_no_wider_than_the_terminal(monkeypatch, columns, most):
    monkeypatch.setenv("COLUMNS", columns)
    drawing = draw([("braille", Curve(steps=[0, 50, 120], values=[0.25, 0.5, 1.0]))], "mean reward")
    assert max(map(len, drawing.splitlines())) == most


@pytest.mark.parametrize(("last", "ticks"), [(3, ["0", "1", "2", "3"]), (6, ["0", "1", "2", "3", "4", "5", "6"]), (5, None)])
def test_steps_are_counted_in_whole_numbers(last, ticks):
    drawing = draw([("A", Curve(steps=[0, last], values=[0.5, 0.6])), ("B", Curve(steps=[0], values=[0.5]))], "loss")
    numbers = drawing.splitlines()[-2].split()
    assert all(number.isdigit() for number in numbers)
    assert ticks is None or numbers == ticks


def test_curves_of_one_value_are_one_line():
    constant = Curve(steps=[1, 2, 3], values=[0.0] * 3)
    assert draw([("braille", constant)], "mean reward") == "mean reward: 0.000 from step 1 to 3"
    assert draw([("A", constant), ("B", Curve(steps=[5], values=[0.0]))], "loss") == "loss: 0.000 from step 1 to 5"
