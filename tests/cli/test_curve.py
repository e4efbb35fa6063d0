"""The curve printed at the end of a run."""

import pytest

from rlcore_cli.curve import draw
from rlcore_cli.report.run_folder import Curve


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
