"""Console output of a run: a line per step in a pipe, a progress bar on a terminal, and neither stops the run."""

import io
import os
import re
import subprocess
import sys
import threading

import pytest
from rich.console import Console

from rl_train.metrics.console import SHOWN, ConsoleLogger
from rl_train.metrics.progress import Progress, SampledBatch

METRICS = {name: 0.5 for name, _, _ in SHOWN if name != "loss"} | {"grad_norm": 0.0}
NUMBERS = [f"{short} {METRICS[name]:{form}}" for name, short, form in SHOWN if name in METRICS]


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
    logger.log_metrics({"validation/loss": 0.25, "loss": -0.5, "time/refit_s": 1.0}, 7)
    logger.log_metrics({"loss": 0.5}, 8)
    logger.finish()
    assert pipe.getvalue() == "step 7/20  loss -0.5000  val loss 0.2500\nstep 8/20  loss 0.5000\n"


def test_metrics_are_printed_only_if_they_say_something():
    """The policy-gradient loss is near 0; a gradient matters if it is clipped or zero, a mismatch if it is large."""
    pipe = io.StringIO()
    logger = ConsoleLogger(total_steps=20, clip_norm=1.0, console=Console(file=pipe, width=200))
    logger.log_metrics({"reward/mean": 0.5, "loss": 1e-9, "grad_norm": 0.7, "mismatch/kl": 1e-5}, 1)
    logger.log_metrics({"reward/mean": 0.5, "loss": 1e-9, "grad_norm": 1.7, "mismatch/kl": 0.02}, 2)
    logger.log_metrics({"reward/mean": 0.5, "grad_norm": 0.0, "mismatch/kl": float("nan")}, 3)
    logger.finish()
    assert pipe.getvalue().splitlines() == [
        "step 1/20  reward 0.500",
        "step 2/20  reward 0.500  grad 1.700  mismatch 2.0e-02",
        "step 3/20  reward 0.500  grad 0.000  mismatch nan",
    ]


def test_redirected_output_shows_what_a_long_step_is_doing():
    progress, lines = Progress(), Lines()
    logger = ConsoleLogger(total_steps=20, describe=lambda: str(progress), progress_every_s=0.01, console=Console(file=lines))
    progress.begin("rollout")
    progress.rollouts.begun, progress.rollouts.ended, progress.rollouts.tokens = 64, 16, 4000
    line = lines.wait_for("16/64 rollouts")
    logger.finish()
    assert re.fullmatch(r"step 1/20  rollout \d+ s  16/64 rollouts  \d+ tokens/s  about \d+ s left", line)


def test_a_terminal_redraws_what_the_step_is_doing():
    progress, screen = Progress(), io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None)
    logger = ConsoleLogger(total_steps=20, describe=lambda: str(progress), console=console)
    progress.begin("train")
    logger.log_metrics({"reward/mean": 0.5}, 7)
    logger.finish()
    assert re.search(r"train \d+ s", screen.getvalue())


def test_a_phase_counts_only_its_own_rollouts_and_shows_how_long_it_took_before():
    progress = Progress()
    progress.begin("rollout")
    progress.rollouts.begun = progress.rollouts.ended = 8
    progress.end(None)
    assert str(progress) == ""
    progress.begin("rollout")
    assert re.fullmatch(r"rollout 0 s  0 s in the last step", str(progress))
    progress.rollouts.begun = 12
    assert "0/4 rollouts" in str(progress)
    progress.rollouts.ended += 2
    assert "2/4 rollouts" in str(progress)


def test_a_batch_advances_while_it_is_sampled_and_counts_once_when_it_has_been():
    progress, counts = Progress(), None
    progress.begin("rollout")
    progress._since -= 10.0
    rollouts = progress.rollouts
    rollouts.begun = 64
    rollouts.batch = SampledBatch(rows=64, are_rollouts=True, read=lambda: counts)
    assert str(progress) == "rollout 10 s  64 rollouts in one batch"
    counts = (0, 1005)
    assert str(progress) == "rollout 10 s  0/64 rollouts  100 tokens/s"
    counts = (16, 4005)
    assert str(progress) == "rollout 10 s  16/64 rollouts  400 tokens/s  about 30 s left"
    rollouts.batch, rollouts.sampled, rollouts.tokens = None, 64, 8005
    assert str(progress) == "rollout 10 s  0/64 rollouts scored  800 tokens/s"
    rollouts.ended = 64
    assert str(progress) == "rollout 10 s  64/64 rollouts  800 tokens/s"
    progress.end(None)
    progress.begin("rollout")
    rollouts.begun = 128
    assert "  0/64 rollouts  " in str(progress)


def test_a_batch_of_turns_shows_its_turns_and_the_rollouts_that_have_ended():
    progress = Progress()
    progress.begin("rollout")
    progress._since -= 10.0
    rollouts = progress.rollouts
    rollouts.begun, rollouts.ended, rollouts.tokens = 64, 16, 3005
    rollouts.batch = SampledBatch(rows=48, are_rollouts=False, read=lambda: (12, 1000))
    assert str(progress) == "rollout 10 s  16/64 rollouts  12/48 in this turn  400 tokens/s  about 30 s left"


def test_the_elapsed_time_includes_that_of_earlier_processes():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None)
    logger = ConsoleLogger(total_steps=20, first_step=10, earlier_s=7200.0, console=console)
    logger.log_metrics({"reward/mean": 0.5}, 11)
    logger.finish()
    assert "2:00:0" in screen.getvalue()


class Lines(io.StringIO):
    """Output of another thread, with a wait for a line that contains a text."""

    def __init__(self):
        super().__init__()
        self._changed = threading.Condition()

    def write(self, text):
        with self._changed:
            count = super().write(text)
            self._changed.notify_all()
        return count

    def wait_for(self, text):
        with self._changed:
            assert self._changed.wait_for(lambda: any(text in line for line in self.getvalue().split("\n")[:-1]), timeout=300)
            return next(line for line in self.getvalue().split("\n") if text in line)


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
