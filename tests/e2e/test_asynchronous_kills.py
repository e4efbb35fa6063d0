"""Runs with `rollout.max_staleness: 2`, two policy ranks and two replicas, whose processes are killed in every phase.

The run continues or ends with a clear error, no process is left, the bound holds, and each prompt is trained once.
"""

import json
import os
import signal
import textwrap
from collections import Counter

import psutil
import pytest
from e2e_runs import TRAP_CALLS, checkpoint_of, metrics_of
from killed_processes import kill

from rl_train.metrics.jsonl import read_jsonl

pytestmark = [
    pytest.mark.ray,
    pytest.mark.full("test_asynchronous_runs.py kills one run; these runs take minutes"),
]

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
        from rl_core.dispatch.policy import DistributedPolicy
        from rl_train.checkpoints import store
        from rl_train.rollouts.evaluate import Evaluation
        from rl_train.weight_sync.synchronizer import WeightSynchronizer
        trap(DistributedPolicy, "train", "train", after=True)  # weights have changed, and rollouts are in progress
        trap(WeightSynchronizer, "_prove_fingerprint", "refit")
        trap(WeightSynchronizer, "sync", "rollout", after=True)  # the step waits for its rollouts next
        trap(Evaluation, "play", "validation")
        trap(store, "write_manifest", "checkpoint")
    """
)
PHASES = ("rollout", "train", "refit", "validation", "checkpoint")
PROMPTS = GROUP_SIZE = 4
"""Prompts per step, and rollouts per prompt."""


@pytest.fixture
def config(slow_turns, tmp_path):
    with (tmp_path / "slow_turns.py").open("a") as module:
        module.write(TRAP_CALLS + TRAPPED)
    return slow_turns


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


@pytest.mark.timeout(3600)
def test_killed_replicas_and_environments_do_not_end_the_run(train, config, tmp_path):
    steps, victims = 60, ("generation 0", "generation 1", "environment")
    kills = [(phase, victim) for victim in victims for phase in PHASES]
    run = train(config(steps))
    held = Held(run, tmp_path)
    for phase, victim in kills:
        kill(held.wait_with(phase, victim))
        held.release()
    code, output = run.wait(900)
    assert code == 0, output
    assert "\x1b" not in output  # lines of Ray's daemons in a file
    run.assert_gone()
    metrics = assert_history(tmp_path, steps)
    replicas = sum(victim.startswith("generation") for _, victim in kills)
    assert sum(row.get("generation/restarts", 0) for row in metrics.values()) == replicas


ENDS = {
    "driver": [(phase, signal.SIGKILL) for phase in PHASES],
    "policy 1": [(phase, signal.SIGKILL) for phase in PHASES],
    "driver, asked to stop": [("rollout", signal.SIGTERM), ("train", signal.SIGTERM)],
}
STOPPED = "stopping after this step"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("victim", ENDS)
def test_a_run_that_ends_with_its_driver_or_policy_resumes_without_losing_or_repeating_a_prompt(
    train, config, tmp_path, victim
):
    steps, name = 30, victim.split(",")[0]
    for phase, sent in ENDS[victim]:
        run = train(config(steps))
        held = Held(run, tmp_path)
        run.wait_for(checkpoint_of(1, tmp_path).exists)  # a run that is killed before does not resume: a new one begins
        os.kill(held.wait_with(phase, name), sent)
        if sent == signal.SIGTERM:
            run.wait_for(lambda run=run: STOPPED in run.output())
        held.release()
        code, output = run.wait()
        run.assert_gone()
        print(phase, victim, code, output.strip().splitlines()[-1])
        assert "Traceback" not in output
        assert code == {"driver": -sent, "policy 1": 1}.get(victim, 128 + sent)
        assert name == "driver" or "of 'policy'" in output
    code, output = train(config(steps)).wait()
    assert code == 0, output
    assert_history(tmp_path, steps)
