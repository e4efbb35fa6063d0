"""Console output of a run: a line per step in a pipe, a progress bar on a terminal, and neither stops the run."""

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from rl_train.metrics.console import SHOWN, ConsoleLogger

METRICS = {name: 0.5 for name, _, _ in SHOWN}
NUMBERS = [f"{short} {0.5:{form}}" for _, short, form in SHOWN]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_terminal_of_any_width_shows_the_bar_and_every_number_whole(width):
    screen = io.StringIO()
    logger = ConsoleLogger(total_steps=20, console=Console(file=screen, force_terminal=True, width=width, color_system=None))
    logger.log_metrics(METRICS, 7)
    screen.truncate(0)
    logger.log_metrics(METRICS, 8)
    logger.finish()
    lines = screen.getvalue().splitlines()
    assert any("step  8/20" in line and "━" in line for line in lines)
    assert [number for number in NUMBERS if not any(number in line for line in lines)] == []


def test_validation_results_stay_above_the_live_display():
    screen = io.StringIO()
    logger = ConsoleLogger(total_steps=20, console=Console(file=screen, force_terminal=True, width=80, color_system=None))
    logger.log_metrics(METRICS, 7)
    logger.finish()
    assert "step 7/20  accuracy 0.500  val loss 0.5000\n" in screen.getvalue()


def test_without_a_terminal_each_step_is_one_plain_line():
    pipe = io.StringIO()
    logger = ConsoleLogger(total_steps=20, console=Console(file=pipe, width=40))
    logger.log_metrics({"reward/mean": 0.25, "loss": -0.5, "time/refit_s": 1.0}, 7)
    logger.log_metrics({"reward/mean": 0.5}, 8)
    logger.finish()
    assert pipe.getvalue() == "step 7/20  reward 0.250  loss -0.5000\nstep 8/20  reward 0.500\n"


def test_the_reward_of_a_validation_is_shown_if_it_has_no_accuracy():
    pipe = io.StringIO()
    logger = ConsoleLogger(total_steps=20, console=Console(file=pipe, width=40))
    logger.log_metrics({"validation/reward": 0.625}, 0)
    logger.log_metrics({"validation/reward": 0.75, "validation/accuracy": 0.5}, 1)
    logger.log_metrics({"time/validate_s": 1.0}, 2)
    logger.finish()
    assert pipe.getvalue() == "step 0/20  val reward 0.625\nstep 1/20  accuracy 0.500\nstep 2/20\n"


def test_a_run_continues_when_its_output_is_closed():
    code = (
        "import sys\n"
        "from rl_train.metrics.console import ConsoleLogger\n"
        "logger = ConsoleLogger(total_steps=9)\n"
        "for step in range(9):\n"
        "    logger.log_metrics({'loss': 1.0}, step)\n"
        "logger.finish()\n"
        "print('a last word')\n"
        "print('all steps done', file=sys.stderr)\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=240, check=False
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "all steps done")
    assert "standard output was closed" in done.stderr
