"""Holds a run in a phase of its step loop while a test kills something, and checks the history of the run afterwards."""

import json
import textwrap
from collections import Counter

import psutil
from e2e_runs import TRAP_CALLS, metrics_of

from rl_train.metrics.jsonl import read_jsonl

TRAPPED = textwrap.dedent(
    """
    import sys

    def pass_by(where):
        '''Wait if the file `hold` names this phase, until it names another one or is taken away; `held` says so.'''
        if held_in(where):
            (FOLDER / "held").write_text(where)
            while held_in(where):
                time.sleep(0.02)
            (FOLDER / "held").unlink(missing_ok=True)

    def held_in(where):
        try:
            return (FOLDER / "hold").read_text() == where
        except FileNotFoundError:
            return False

    if "rl_train.launch.train" in sys.modules:  # the driver
        from rl_backends_base.distributed_policy import DistributedPolicy
        from rl_train.checkpoints import store
        from rl_train.rollouts.evaluation import Evaluation
        from rl_train.weight_sync.sender import WeightSender
        from rl_train.weight_sync.synchronizer import WeightSynchronizer
        trap(DistributedPolicy, "train", "train", after=True)  # weights have changed, and rollouts are in progress
        trap(WeightSender, "_check_fingerprints", "refit")
        trap(WeightSynchronizer, "sync", "rollout", after=True)  # the step waits for its rollouts next
        trap(Evaluation, "play", "validation")
        trap(store, "write_manifest", "checkpoint")
    """
)
PHASES = ("rollout", "train", "refit", "validation", "checkpoint")
PROMPTS = GROUP_SIZE = 4
"""Prompts per step, and rollouts per prompt."""


def holdable(config, folder):
    """The config of `slow_turns`, whose environment module makes the run one that `Held` holds."""
    with (folder / "slow_turns.py").open("a") as module:
        module.write(TRAP_CALLS + TRAPPED)
    return config


class Held:
    """Holds a run in a phase of its step loop until it is released."""

    def __init__(self, run, folder):
        self.run, self.folder = run, folder

    def wait_in(self, phase):
        (self.folder / "held").unlink(missing_ok=True)  # of a run that was killed
        (self.folder / "hold.tmp").write_text(phase)
        (self.folder / "hold.tmp").replace(self.folder / "hold")
        self.run.wait_for((self.folder / "held").exists)

    def release(self):
        (self.folder / "hold").unlink()

    def wait_with(self, phase, name):
        """Wait in the next step whose `phase` begins while a worker is alive, which may be in the middle of a restart."""
        self.wait_in(phase)
        while (pid := self.victim(name)) is None:
            self.release()
            self.run.wait_for(lambda: not (self.folder / "held").exists())
            self.wait_in(phase)
        return pid

    def victim(self, name):
        """The process id of a worker that is alive now."""
        if name == "driver":
            return self.run.process.pid
        alive = {process.pid for process in self.run.descendants()}
        if name == "environment":
            pids = [int(path.name) for path in (self.folder / "environments").iterdir()]
            return max(filter(psutil.pid_exists, pids), default=None)
        group, rank = name.split()
        workers = json.loads((self.folder / "runs/run/status.json").read_text()).get("workers", {})
        pid = workers[group][int(rank)] if group in workers else None
        return pid if pid in alive else None


def assert_history(folder, steps):
    """Every step is there once, no row exceeds the bound, and each prompt is trained once."""
    metrics = metrics_of(folder)
    assert [step for step in sorted(metrics) if step > 0] == list(range(1, steps + 1))
    delivered, trained = {}, Counter()
    for step in range(1, steps + 1):
        delivered[metrics[step]["refit/weight_version"]] = step
        rows = read_jsonl(folder / f"runs/run/rollouts/step_{step:06d}.jsonl")
        assert len(rows) == PROMPTS * GROUP_SIZE
        ages = [step - delivered[version] for row in rows for version in row["turn_versions"]]
        assert max(ages) == metrics[step]["staleness/steps_max"] <= 2
        trained.update(row["index"] for row in rows)
    assert len(trained) == steps * PROMPTS
    assert set(trained.values()) == {GROUP_SIZE}
    return metrics
