"""Runs with `rollout.max_staleness: 2`, two policy ranks and two replicas, whose processes are killed in every phase.

The run continues or ends with a clear error, no process is left, the bound holds, and each prompt is trained once.
"""

import os
import random
import signal
import time

import pytest
from e2e_runs import checkpoint_of, merged
from held_runs import PHASES, Held, assert_history, holdable
from killed_processes import kill

pytestmark = [
    pytest.mark.ray,
    pytest.mark.full("test_asynchronous_runs.py kills one run; these runs take minutes"),
]


@pytest.fixture
def config(slow_turns, tmp_path):
    return holdable(slow_turns, tmp_path)


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


@pytest.mark.timeout(3600)
def test_kills_at_random_moments_lose_and_repeat_no_prompt(train, config, tmp_path):
    chosen = random.Random(0)
    victims = 5 * ["generation 0", "generation 1", "environment", "policy 1", "driver"]
    chosen.shuffle(victims)
    endless = merged(config(100_000), {"data": {"train": {"num_samples": 4_000}}})
    checkpoints = tmp_path / "runs/run/checkpoints"

    def newest():
        return max((int(path.name[-6:]) for path in checkpoints.glob("step_??????")), default=0)

    def wait_for_a_step(run):
        saved = newest()
        run.wait_for(lambda: newest() > saved)

    run = train(endless)
    for victim in victims:
        wait_for_a_step(run)
        time.sleep(chosen.uniform(0.0, 2.0))
        held = Held(run, tmp_path)
        run.wait_for(lambda victim=victim, held=held: held.victim(victim) is not None)
        print(victim, "in step", newest() + 1)
        os.kill(held.victim(victim), signal.SIGKILL)
        if victim in ("driver", "policy 1"):
            code, output = run.wait()
            run.assert_gone()
            assert "Traceback" not in output
            assert code == (-signal.SIGKILL if victim == "driver" else 1)
            run = train(endless)
    wait_for_a_step(run)
    run.kill(signal.SIGTERM)
    code, output = run.wait()
    assert code == 128 + signal.SIGTERM, output
    run.assert_gone()
    assert_history(tmp_path, newest())
