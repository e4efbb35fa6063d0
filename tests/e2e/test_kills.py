"""A run that is killed or signalled anywhere ends as documented, and one plain restart leads to the result of an unbroken run.

Equal are every file of the last checkpoint (weights, optimizer, generators, position in the data), the rollouts, and metrics
except those of refits, because an engine that has just started needs one.
"""

import json
import os
import signal
import textwrap

import pytest
from e2e_runs import MEASURED, ROOT, TINY, TRAP_CALLS, TrainingProcess, checkpoint_of, merged, reproducible_metrics_of
from killed_processes import kill

from rl_train.metrics.jsonl import read_jsonl

pytestmark = pytest.mark.slow

TRAP = textwrap.dedent(
    """
    import os, sys, threading, time
    from pathlib import Path
    from rl_envs import ArithmeticEnvironment

    FOLDER = Path(__file__).parent
    counts = {}

    def pass_by(where):
        '''Wait if the file `hold` names this place and visit, until that file is taken away; `held` has the process id.'''
        counts[where] = counts.get(where, 0) + 1
        hold = FOLDER / "hold"
        if hold.exists() and hold.read_text() == f"{where} {counts[where]}":
            (FOLDER / "held.tmp").write_text(str(os.getpid()))
            os.replace(FOLDER / "held.tmp", FOLDER / "held")
            while hold.exists():
                time.sleep(0.02)

    class TrapEnvironment(ArithmeticEnvironment):
        def __init__(self, cfg):
            super().__init__({})

        def step(self, message_log_batch, metadata):
            pass_by("environment")
            return super().step(message_log_batch, metadata)

    one_at_a_time = threading.Lock()  # rows that are decoded together change each other's last bits

    def agent(base_url, api_key, model, messages, metadata):
        sys.path.append(ROOT)
        from examples.agents.adder import add

        with one_at_a_time:
            pass_by("agent")
            return add(base_url, api_key, model, messages, metadata)

    if "rl_train.launch.train" in sys.modules:  # the driver
        from rl_backends_base.distributed_policy import DistributedPolicy
        from rl_train.checkpoints import store
        from rl_train.weight_sync.sender import WeightSender
        from rl_train.weight_sync.synchronizer import WeightSynchronizer
        trap(DistributedPolicy, "train", "train", after=True)  # weights have changed, nothing is logged
        trap(WeightSynchronizer, "sync", "sync")  # before a refit; in this process, the engine has the policy's own tensors
        trap(WeightSender, "_check_fingerprints", "refit")  # the engine has new weights, and its version is not set
        trap(store, "write_manifest", "checkpoint")  # all other files are there, under the incomplete name
    """
)
VISITS = {
    "rollout": "environment 4",
    "validation": "environment 6",
    "train": "train 3",
    "refit": "refit 4",
    "sync": "sync 5",
    "checkpoint": "checkpoint 3",  # the first is that of the rehearsal
    "agent": "agent 45",
}
"""Each is after the checkpoint of step 2 and before that of step 4 is complete."""
HERE, OVER_RAY = (("rollout", "validation", "train", weights, "checkpoint") for weights in ("sync", "refit"))
SETTINGS = {
    "in process": {"cluster": {"backend": "in_process"}},
    "ray": {"cluster": {"backend": "ray"}},
    "agents": {"cluster": {"backend": "in_process"}, "env": {"arithmetic": None, "sums": {"agent": "trap.agent"}}},
}
CONFIG = {
    "grpo": {"max_num_steps": 6, "val_period": 2, "val_at_start": False},
    "data": {"validation": {"dataset_name": "arithmetic", "num_samples": 8, "split": "validation"}},
    "env": {"arithmetic": {"env_cls": "trap.TrapEnvironment", "num_workers": 1}},
}
CODES = {"SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129}
ONE, TWO = ("SIGTERM",), ("SIGTERM", "SIGTERM")
ROWS = [
    *(("in process", where, "driver", ("SIGKILL",)) for where in HERE),
    *(("in process", where, "driver", TWO) for where in HERE),
    ("in process", "rollout", "driver", ("SIGHUP",)),
    ("in process", "train", "driver", ("SIGINT",)),
    ("in process", "checkpoint", "driver", ONE),
    ("in process", "validation", "driver", ("SIGINT", "SIGTERM")),
    ("in process", "sync", "driver", ("SIGHUP", "SIGINT")),
    *(("ray", where, "driver", ("SIGKILL",)) for where in OVER_RAY),
    ("ray", "rollout", "driver", ONE),
    ("ray", "refit", "driver", ("SIGHUP",)),
    ("ray", "train", "driver", TWO),
    ("ray", "checkpoint", "driver", ("SIGINT", "SIGTERM")),
    ("ray", "validation", "driver", TWO),
    *(("ray", where, "policy", ("SIGKILL",)) for where in OVER_RAY),
    *(("agents", "agent", "driver", signals) for signals in (("SIGKILL",), ONE, TWO)),
    ("ray", "rollout", "generation", ("SIGKILL",)),
    ("ray", "refit", "generation", ("SIGKILL",)),
    ("ray", "rollout", "environment", ("SIGKILL",)),
    ("ray", "validation", "environment", ("SIGKILL",)),
]


def start_run(folder, setting):
    (folder / "trap.py").write_text((TRAP_CALLS + TRAP).replace("ROOT", repr(str(ROOT))))
    return TrainingProcess(folder, merged(merged(TINY, CONFIG), SETTINGS[setting]))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The folder of a run that nothing disturbed, by setting."""
    folders = {}

    def run(setting):
        if setting not in folders:
            folders[setting] = tmp_path_factory.mktemp("unbroken")
            code, output = start_run(folders[setting], setting).wait()
            assert code == 0, output
        return folders[setting]

    return run


@pytest.mark.full("test_ppo.py and test_resume_of_algorithms.py resume runs, test_stopped_runs.py stops one over Ray")
@pytest.mark.parametrize(
    ("setting", "where", "victim", "signals"), ROWS, ids=lambda value: value if isinstance(value, str) else "+".join(value)
)
def test_a_run_that_is_killed_or_signalled_leads_to_the_result_of_an_unbroken_run(
    unbroken, tmp_path, setting, where, victim, signals
):
    (tmp_path / "hold").write_text(VISITS[where])
    run = start_run(tmp_path, setting)
    try:
        run.wait_for((tmp_path / "held").exists)
        send(run, victim, signals, tmp_path)
        (tmp_path / "hold").unlink()
        code, output = run.wait()
        run.assert_gone()
        assert "Traceback" not in output
        expect_end(victim, signals, code, tmp_path)
        if code != 0:
            run = start_run(tmp_path, setting)
            code, output = run.wait()
            assert code == 0, output
            assert "resumed from" in output
            run.assert_gone()
    finally:
        for process in run.descendants():
            process.kill()
    assert_equal(unbroken(setting), tmp_path, victim, where)


def send(run, victim, signals, folder):
    """Send signals to a process of the run; the first one is handled before the second is sent."""
    workers = json.loads((folder / "runs" / "run" / "status.json").read_text())["workers"]
    pids = {"driver": run.process.pid, "environment": int((folder / "held").read_text())}
    pid = pids.get(victim) or workers[victim][0]
    if signals == ("SIGKILL",) and victim != "driver":
        kill(pid)
        return
    for count, name in enumerate(signals):
        os.kill(pid, signal.Signals[name])
        words = ("stopping after this step", "stopping at once")[count]
        if name != "SIGKILL":
            run.wait_for(lambda words=words: words in run.output() or run.process.poll() is not None)


def expect_end(victim, signals, code, folder):
    """The documented end: exit code and status."""
    status = json.loads((folder / "runs" / "run" / "status.json").read_text())
    left = sorted(path.name for path in checkpoint_of(0, folder).parent.glob("*.partial"))
    if victim in ("environment", "generation"):
        assert (code, status["state"], left) == (0, "finished", [])
    elif victim == "policy":
        assert (code, status["state"], left) == (1, "failed", [])
    elif signals == ("SIGKILL",):
        assert (code, status["state"]) == (-signal.SIGKILL, "running")
    else:
        assert (code, status["state"], left) == (CODES[signals[0]], "interrupted", [])


def assert_equal(expected, found, victim, where):
    metrics = [reproducible_metrics_of(folder) for folder in (expected, found)]
    counts = [{step: row.pop("generation/restarts") for step, row in run.items()} for run in metrics]
    assert sum(counts[1].values()) == (victim == "generation")
    repeated = [step for step, row in metrics[1].items() if row.pop("rollout/repeated_steps", 0)]
    assert repeated == ([3] if (victim, where) == ("environment", "rollout") else [])
    if (victim, where) == ("environment", "validation"):
        assert metrics[1][4].pop("validation/repeated_steps") > 0
    assert without_refits(metrics[1]) == without_refits(metrics[0])
    assert rollouts_of(found) == rollouts_of(expected)
    assert digests_of_last(found) == digests_of_last(expected)
    assert [path.name for path in (found / "runs").iterdir()] == ["run"]


def without_refits(metrics):
    return {
        step: {name: value for name, value in row.items() if not name.startswith("refit/")} for step, row in metrics.items()
    }


def rollouts_of(folder):
    """The records of all steps, without times."""
    paths = sorted((folder / "runs" / "run" / "rollouts").glob("step_*.jsonl"))
    assert len(paths) == 6
    return [
        {key: value for key, value in row.items() if not key.endswith(MEASURED)} for path in paths for row in read_jsonl(path)
    ]


def digests_of_last(folder):
    """Digests of the last checkpoint, with the states of the generators; torch writes a random id into `.metadata`."""
    files = json.loads((checkpoint_of(6, folder) / "manifest.json").read_text())["files"]
    return {name: file["digest"] for name, file in files.items() if not name.endswith(".metadata")}
