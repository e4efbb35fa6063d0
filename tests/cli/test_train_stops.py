"""How `rlcore train` stops: by signals, within the grace period, and at its time limit."""

import json
import re
import signal
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from signal import SIGHUP, SIGTERM
from types import SimpleNamespace

import pytest
from torch.distributed.checkpoint import FileSystemWriter

from rl_train.checkpoints.store import TimeLimit
from rl_train.config.schema import parse_duration
from rl_train.errors import RunInterrupted, StopReason
from rl_train.launch.session import StopSignals
from rlcore_cli.main import main

ROOT = Path(__file__).parents[2]
ENVIRONMENT = """
import os
import shutil
import signal
import time

from rl_envs import ArithmeticEnvironment


class Interrupting(ArithmeticEnvironment):
    steps = 0

    def step(self, *arguments, **named):
        Interrupting.steps += 1
        if Interrupting.steps == 2:
            if "DELETE" in os.environ:
                shutil.rmtree(os.environ["DELETE"])
            else:
                signal.raise_signal(getattr(signal, os.environ["SIGNAL"]))
            if "HANG" in os.environ:
                time.sleep(600)
        return super().step(*arguments, **named)
"""


@pytest.fixture(autouse=True)
def default_sighup():
    """SIGHUP is not ignored, as it is by a suite that was started with `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def rlcore(monkeypatch, capfd, tmp_path):
    """`rlcore train` of five steps in this process: exit code and standard error."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # otherwise the command sets it permanently
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    small = {"max_num_steps": 5, "num_prompts_per_step": 2, "val_period": 0, "val_at_start": False, "val_at_end": False}
    values = {
        "defaults": str(ROOT / "examples" / "grpo_addition.yaml"),
        "grpo": small,
        "cluster": {"backend": "in_process"},
        "logger": {"run_name": "run"},
    }
    (tmp_path / "sums.yaml").write_text(json.dumps(values))

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["rlcore", "train", "sums.yaml", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code or 0, capfd.readouterr().err

    return call


@pytest.fixture
def interrupted(rlcore, monkeypatch, tmp_path, request):
    """Runs whose second step raises a signal."""

    def call(name, *arguments, hang=False):
        module = re.sub(r"\W", "_", f"interrupting_{request.node.name}")
        (tmp_path / f"{module}.py").write_text(ENVIRONMENT)
        monkeypatch.setenv("SIGNAL", name)
        if hang:
            monkeypatch.setenv("HANG", "1")
        return rlcore(f"++env.arithmetic.env_cls={module}.Interrupting", *arguments)

    return call


def status(folder):
    return json.loads((folder / "runs" / "run" / "status.json").read_text())


def checkpoints(folder):
    return sorted(path.name for path in (folder / "runs" / "run" / "checkpoints").glob("step_*"))


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_signal_ends_the_run_after_its_step_with_a_checkpoint(interrupted, tmp_path, name, code):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    found, errors = interrupted(name)
    assert found == code
    assert errors.splitlines()[-2:] == [
        f"warning: {name}: stopping after this step, with a checkpoint; a second signal stops at once",
        f"Stopped after step 2 ({name}): its checkpoint is saved; run the same command to continue.",
    ]
    assert checkpoints(tmp_path) == ["step_000002"]
    assert status(tmp_path).items() >= {"state": "interrupted", "reason": name}.items()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers


def test_step_that_outlives_the_grace_period_is_ended_without_a_checkpoint(interrupted, tmp_path):
    code, errors = interrupted("SIGTERM", "checkpointing.stop_grace_s=0.1", hang=True)
    assert code == 143
    assert "checkpointing.stop_grace_s (0.1 s) is over: stopping at once" in errors
    assert errors.splitlines()[-1].startswith("Stopped immediately (SIGTERM).")
    assert checkpoints(tmp_path) == []
    ended = status(tmp_path)
    assert (ended["state"], ended["reason"], ended["during"]) == ("interrupted", "SIGTERM", "rollout")


@pytest.mark.parametrize("first", [SIGTERM, SIGHUP])
def test_second_signal_while_a_checkpoint_is_written_is_an_interruption_and_leaves_no_incomplete_files(
    rlcore, monkeypatch, tmp_path, first
):
    write = FileSystemWriter.write_data

    def interrupted_write(*arguments):
        # Torch converts what is raised here, even the interruption of the main thread, to another error.
        signal.raise_signal(first)
        signal.raise_signal(SIGTERM)
        return write(*arguments)

    monkeypatch.setattr(FileSystemWriter, "write_data", interrupted_write)
    code, errors = rlcore("checkpointing.save_period=2")
    name = StopReason.SIGTERM if first is SIGTERM else StopReason.SIGHUP
    assert code == name.exit_code
    assert errors.splitlines()[-2:] == [
        "warning: SIGTERM again: stopping at once; progress since the last checkpoint is lost",
        f"Stopped immediately ({name.label}). The same command continues from the last checkpoint, if any.",
    ]
    assert status(tmp_path).items() >= {"state": "interrupted", "reason": name.label}.items()
    assert checkpoints(tmp_path) == []


@pytest.mark.parametrize("folder", ["runs/run", "runs/run/rollouts"])
def test_run_folder_deleted_during_the_run_is_one_error(interrupted, monkeypatch, tmp_path, folder):
    monkeypatch.setenv("DELETE", str(tmp_path / folder))
    code, errors = interrupted("SIGTERM")
    assert code == 1
    assert [line for line in errors.splitlines() if "num_warmup_steps" not in line and "loading PyTorch" not in line] == [
        f"error: {folder} was deleted during the run, so runs/run/rollouts/step_000002.jsonl cannot be written. The same "
        "command continues from the last complete checkpoint; if that was deleted too, it starts a new run."
    ]
    if folder == "runs/run/rollouts":
        assert status(tmp_path)["state"] == "failed"


def test_deleted_checkpoint_folder_is_created_again_with_its_lock_and_identity(interrupted, monkeypatch, tmp_path):
    folder = tmp_path / "runs" / "run" / "checkpoints"
    monkeypatch.setenv("DELETE", str(folder))
    code, errors = interrupted("SIGTERM")
    assert code == 0
    assert f"warning: {folder.relative_to(tmp_path)} was deleted during the run" in errors
    assert checkpoints(tmp_path) == ["step_000005"]
    assert (folder / "run.json").read_bytes() == (tmp_path / "runs" / "run" / "run.json").read_bytes()


def test_an_ignored_sighup_stays_ignored(interrupted, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    try:
        code, _ = interrupted("SIGHUP", "grpo.max_num_steps=3")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert code == 0
    assert status(tmp_path)["state"] == "finished"


def test_signal_while_the_run_is_being_built_ends_it_at_once():
    with pytest.raises(RunInterrupted, match="SIGTERM") as caught, StopSignals().listen():
        signal.raise_signal(signal.SIGTERM)
    assert (caught.value.exit_code, caught.value.reason, caught.value.step) == (143, StopReason.SIGTERM, None)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_that_python_loses_in_a_finalizer_still_interrupts(name):
    class Interrupted:
        def __del__(self):
            signal.raise_signal(getattr(signal, name))

    def lose() -> None:
        lost = Interrupted()
        del lost
        time.sleep(60)

    before = sys.unraisablehook
    with pytest.raises(RunInterrupted, match=f"{name}|Ctrl-C"), StopSignals().listen():
        lose()
    assert sys.unraisablehook is before


def test_a_signal_that_python_loses_just_before_the_run_ends_is_not_sent_to_what_follows(monkeypatch):
    class Interrupted:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    followed, timers = [], []
    start = threading.Timer.start
    monkeypatch.setattr(threading.Timer, "start", lambda timer: (timers.append(timer), start(timer)))
    before = signal.signal(signal.SIGTERM, lambda *_: followed.append(True))
    try:
        with StopSignals().listen():
            lost = Interrupted()
            del lost
        for timer in timers:
            timer.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (len(timers), followed) == (1, [])


@pytest.mark.parametrize("signals", [1, 2])
def test_only_the_second_signal_interrupts_a_run_that_has_reached_its_time_limit(signals):
    run = SimpleNamespace(stop_reason=StopReason.MAX_TIME, checkpoints=object())
    stop, sent = StopSignals(), []
    with pytest.raises(RunInterrupted, match="SIGTERM") if signals == 2 else nullcontext(), stop.listen():
        stop.end_after_step(run)
        for number in range(signals):
            sent.append(number)
            signal.raise_signal(signal.SIGTERM)
    assert len(sent) == signals
    assert run.stop_reason is StopReason.MAX_TIME


@pytest.mark.slow
def test_run_that_reaches_its_time_limit_saves_and_the_same_command_continues(rlcore, tmp_path):
    for step in (1, 2):
        code, errors = rlcore("checkpointing.max_time=0.001")
        assert code == 124
        assert errors.splitlines()[-1].startswith(f"Stopped after step {step} (max_time): its checkpoint is saved")
        assert checkpoints(tmp_path)[-1] == f"step_{step:06d}"
        assert status(tmp_path).items() >= {"state": "interrupted", "reason": "max_time"}.items()
    assert rlcore("checkpointing.max_time=1-00:00:00")[0] == 0
    assert status(tmp_path)["state"] == "finished"


def test_time_limit_leaves_time_for_another_step_and_its_checkpoint():
    limit = TimeLimit(100.0, started=1000.0)
    limit.count_step(10.0)
    limit.count_step(20.0)
    assert limit.allows_step(1060.0)  # 60 s + a step of 20 s + a checkpoint that may last as long
    assert not limit.allows_step(1061.0)
    limit.count_save(5.0)
    assert limit.allows_step(1075.0)
    assert not limit.allows_step(1076.0)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("03:50:00", 13800.0), ("2-01:00:00", 176400.0), ("90:00", 5400.0), ("00:00:01.5", 1.5), (3600, 3600.0)],
)
def test_durations_are_read_as_slurm_writes_them(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["4h", "0", "00:00:00", "00:03:50:00", "", "-5", 0, -1.0, float("inf")])
def test_other_durations_are_refused(text):
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


def test_config_error_names_the_time_limit_and_its_line(rlcore, tmp_path):
    code, errors = rlcore("checkpointing.max_time=4h")
    assert code == 2
    assert "checkpointing.max_time: '4h' is not a duration: give seconds, or MM:SS" in errors
