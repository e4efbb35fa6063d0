"""Whole runs with killed generation workers: every step completes with the samples of an undisturbed run."""

import json
import os
import textwrap
from pathlib import Path

import pytest
from e2e_runs import metrics_of, reproducible_metrics_of

pytestmark = pytest.mark.slow

MORTAL = textwrap.dedent(
    """
    import os, signal
    from pathlib import Path
    import rl_backends_hf.generation as room
    from rl_backends_hf.config import HFGenerationConfig
    from rl_backends_hf.generation import HuggingFaceGeneration
    from rl_backends_hf.generation import HFGenerationWorker

    FOLDER = Path({folder!r})

    def die_once(where):
        if where in {deaths!r} and not (FOLDER / where).exists():
            (FOLDER / where).write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)

    class MortalWorker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            where = f"generate-{{self.get_weight_version()}}-{{self.context.rank}}"
            if where in {deaths!r}:
                super().generate(data, greedy=greedy)  # its rows are lost
            die_once(where)
            return super().generate(data, greedy=greedy)

        def poll(self, arrivals, **options):
            ended = super().poll(arrivals, **options)
            if ended:
                die_once(f"poll-{{self.get_weight_version()}}-{{self.context.rank}}")
            return ended

        def load_weights(self, tensors):
            super().load_weights(tensors)
            self.loads = getattr(self, "loads", 0) + 1
            die_once(f"load-{{self.loads}}-{{self.context.rank}}")

    class MortalGeneration(HuggingFaceGeneration):
        capabilities = ("shared_memory", "collective", "by_reference")

        def __init__(self, *, config, **options):
            room.HFGenerationWorker = MortalWorker
            super().__init__(config=HFGenerationConfig(**config.model_dump()), **options)
    """
)
TWO_RANKS = {"cluster": {"workers_per_node": 2}, "grpo": {"max_num_steps": 4}}
BACKEND = "policy.generation.backend=mortal.MortalGeneration"


def mortal(folder, *deaths):
    folder.mkdir(exist_ok=True)
    (folder / "mortal.py").write_text(MORTAL.format(folder=str(folder), deaths=deaths))


def samples_of(folder, step):
    lines = (folder / "runs" / "run" / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return [(row["prompt"], row["tokens"], row["reward"], row["weight_version"]) for row in map(json.loads, lines)]


def assert_nothing_is_left_of(run, folder):
    run.assert_gone()
    pids = json.loads((folder / "runs" / "run" / "status.json").read_text()).get("workers", {}).get("policy", [])
    assert not [path for pid in pids for path in Path("/dev/shm").glob(f"rlcore-{pid}-*")]


@pytest.mark.full(
    "backends_base/dispatch/test_revival.py and core/weights/test_revival_in_refit.py kill the same workers without a run "
    "around them"
)
def test_a_run_whose_generation_workers_are_killed_takes_the_steps_of_an_undisturbed_one(train, tmp_path):
    undisturbed = train(TWO_RANKS, folder=tmp_path / "undisturbed")
    # One replica in the second step's sampling, the other in the refit that follows from it.
    deaths = ("generate-2-1", "load-3-0")
    folder = tmp_path / "killed"
    mortal(folder, *deaths)
    run = train(TWO_RANKS, BACKEND, "policy.generation.refit_transport=collective", folder=folder)
    code, output = run.wait()
    assert code == 0, output
    assert [where for where in deaths if not (folder / where).exists()] == []
    code, output = undisturbed.wait()
    assert code == 0, output
    found, expected = reproducible_metrics_of(folder), reproducible_metrics_of(tmp_path / "undisturbed")
    assert sorted(found) == sorted(expected) == [1, 2, 3, 4]
    assert [found[step].pop("generation/restarts") for step in found] == [0, 2, 0, 0]
    for step in expected:
        assert expected[step].pop("generation/restarts") == 0
        assert samples_of(folder, step) == samples_of(tmp_path / "undisturbed", step)
        assert found[step]["rollout/rows"] == 16.0
        # Log-probabilities differ in their last bits with the rows that are decoded together, and losses with them.
        assert found[step] == pytest.approx(expected[step], rel=1e-3, abs=1e-6)
    assert "exited; restarting it" in (folder / "runs" / "run" / "logs" / "driver.log").read_text()
    assert_nothing_is_left_of(run, folder)


GUESS = {
    "data": {
        "train": {"dataset_name": "guess", "num_samples": 64, "lowest": 10, "highest": 99, "question": "{lowest}-{highest}="}
    },
    "env": {"arithmetic": None, "guess": {"max_guesses": 3, "higher": "+", "lower": "-", "unreadable": "*"}},
    "policy": {"max_total_sequence_length": 64},
}


@pytest.mark.full("backends_base/dispatch/test_revival.py restarts a replica with rows in progress without a run around it")
def test_a_replica_that_is_killed_between_turns_does_not_change_the_rollouts(train, tmp_path):
    changes = {**GUESS, "cluster": {"workers_per_node": 2}, "grpo": {"max_num_steps": 2}}
    undisturbed = train(changes, folder=tmp_path / "undisturbed")
    folder = tmp_path / "killed"
    mortal(folder, "poll-2-1")
    code, output = train(changes, BACKEND, folder=folder).wait()
    assert code == 0, output
    assert (folder / "poll-2-1").exists()
    code, output = undisturbed.wait()
    assert code == 0, output
    assert [metrics_of(folder)[step]["generation/restarts"] for step in (1, 2)] == [0, 1]
    assert metrics_of(folder)[2]["rollout/turns"] > 1
    for step in (1, 2):
        assert samples_of(folder, step) == samples_of(tmp_path / "undisturbed", step)


@pytest.mark.full(
    "backends_base/dispatch/test_revival.py and core/weights/test_revival_in_refit.py kill the same workers without a run "
    "around them"
)
def test_a_run_without_restarts_stops_and_resumes_from_its_checkpoint(train, tmp_path):
    mortal(tmp_path, "generate-6-0")
    changes = {**TWO_RANKS, "checkpointing": {"save_period": 1}}
    run = train(changes, BACKEND, "policy.generation.max_restarts=0")
    code, output = run.wait()
    assert code == 1, output
    victim = (tmp_path / "generate-6-0").read_text()
    assert f"rank 0 (data=0) of 'generation', host {os.uname().nodename}, pid {victim}" in " ".join(output.split())
    assert "`policy.generation.max_restarts` (0) does not allow another restart" in " ".join(output.split())
    assert "Traceback" not in output
    assert_nothing_is_left_of(run, tmp_path)
    assert sorted(metrics_of(tmp_path)) == [1, 2, 3]
    (tmp_path / "generate-6-0").unlink()
    run = train(changes, BACKEND)
    code, output = run.wait()
    assert code == 0, output
    assert "resumed from" in output
    assert [numbers["generation/restarts"] for numbers in metrics_of(tmp_path).values()] == [0, 0, 0, 1]
    assert_nothing_is_left_of(run, tmp_path)
