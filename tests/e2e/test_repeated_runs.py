"""Runs that are repeated bit for bit: `rollout.order: exact`, equal to a synchronous run with late weights, and `--replay`."""

import json
import shutil
from pathlib import Path

import pytest
from e2e_runs import TINY, merged
from safetensors.torch import load_file

from rl_train.assembly import run_assembly, workers
from rl_train.launch.train import train
from rl_train.metrics.jsonl import read_jsonl
from rl_train.rollouts.source import RolloutSource

STEPS = 5
pytestmark = pytest.mark.slow


class Late(RolloutSource):
    """A synchronous source whose batches are sampled k steps before they are trained: the engine's weights are k steps late."""

    def __init__(self, source, k):
        self.source, self.k, self.batches = source, k, []

    def take(self, step, groups, selection=None):
        for _ in range(self.k + 1 if step == 1 else 1):
            self.batches.append(self.source.take(step, groups))
        return self.batches.pop(0)

    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...

    def close(self):
        self.source.close()


@pytest.fixture
def run(tmp_path, local_ray):
    """Runs a changed tiny config over Ray; returns the run folder."""

    def start(name, changes, **options):
        config = merged(TINY, {"loss_fn": {"ratio_to": "sampler"}, "cluster": {"workers_per_node": 1, "use_gpus": False}})
        config = merged(config, {"grpo": {"max_num_steps": STEPS}, "logger": {"log_dir": str(tmp_path), "run_name": name}})
        config = merged(config, {"checkpointing": {"save_period": 1}})
        path = tmp_path / f"{name}.yaml"
        path.write_text(json.dumps(merged(config, changes)))
        return train(path, console=False, **options).folder

    return start


@pytest.fixture
def started(monkeypatch):
    """Names of the components of rollouts that runs have started."""
    names = []

    def count(owner, start, name):
        def counted(*arguments):
            names.append(name)
            return start(*arguments)

        monkeypatch.setattr(owner, start.__name__, counted)

    count(workers.Builder, workers.Builder.generation, "generation")
    count(workers.Builder, workers.Builder.environments, "environments")
    return names


def weights_of(folder, step):
    [file] = (folder / "checkpoints" / f"step_{step:06d}").glob("policy/weights/*.safetensors")
    return load_file(file)


def are_equal(one, other):
    return one.keys() == other.keys() and all(tensor.equal(other[name]) for name, tensor in one.items())


def trained(folder, step):
    keys = ("index", "sample", "tokens", "logprobs", "reward", "weight_version", "advantage")
    return [[row[key] for key in keys] for row in read_jsonl(folder / "rollouts" / f"step_{step:06d}.jsonl")]


@pytest.mark.parametrize("k", [1, pytest.param(2, marks=pytest.mark.full("k = 1 runs in CI"))])
def test_an_exact_run_equals_a_synchronous_run_whose_engine_gets_its_weights_late(run, monkeypatch, k):
    exact = run("exact", {"rollout": {"max_staleness": k, "order": "exact"}})
    source = run_assembly._rollout_source
    monkeypatch.setattr(run_assembly, "_rollout_source", lambda *args: Late(source(*args), k))
    late = run("late", {})
    steps = {row["step"]: row for row in read_jsonl(exact / "metrics.jsonl")}
    assert [steps[step]["staleness/steps_max"] for step in range(1, STEPS + 1)] == [
        min(step - 1, k) for step in range(1, STEPS + 1)
    ]
    for step in range(1, STEPS + 1):
        assert trained(exact, step) == trained(late, step)
        assert are_equal(weights_of(exact, step), weights_of(late, step))
    assert not are_equal(weights_of(exact, 1), weights_of(exact, STEPS)), "nothing was learned"


@pytest.mark.full("tests/train/rollouts/test_asynchronous_source.py resumes a source with an exact schedule")
def test_a_resumed_exact_run_equals_an_uninterrupted_one_bit_for_bit(run, tmp_path):
    changes = {"rollout": {"max_staleness": 2, "order": "exact"}}
    whole = run("whole", changes)
    stopped = tmp_path / "stopped"
    middle = Path("checkpoints") / "step_000002"
    shutil.copytree(whole / middle, stopped / middle)
    assert (stopped / middle / "rollouts" / "groups.json").exists()
    resumed = run("whole", changes, resume=str(stopped))
    assert resumed == stopped
    for step in range(3, STEPS + 1):
        assert trained(whole, step) == trained(stopped, step)
        assert are_equal(weights_of(whole, step), weights_of(stopped, step))


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout": {"max_staleness": 2, "ahead": 2}},
        pytest.param(
            {
                "loss_fn": {"ratio_to": "policy", "use_importance_sampling_correction": True},
                "grpo": {"use_dynamic_sampling": True},
                "rollout": {"max_staleness": 1},
            },
            marks=pytest.mark.full("test_replay.py passes a selection to a replay"),
        ),
    ],
    ids=["one turn", "dynamic sampling and importance weights"],
)
def test_a_replay_of_an_asynchronous_run_has_its_weights_bit_for_bit_without_an_engine(run, changes, started):
    recorded = run("recorded", changes)
    assert sorted(started) == ["environments", "generation"]
    replayed = run("recorded", changes, replay=recorded)
    assert replayed != recorded
    assert sorted(started) == ["environments", "generation"]
    assert not any(name.startswith("refit/") for row in read_jsonl(replayed / "metrics.jsonl") for name in row)
    assert max(row["staleness/steps_max"] for row in read_jsonl(recorded / "metrics.jsonl")) > 0
    for step in range(1, STEPS + 1):
        assert trained(replayed, step) == trained(recorded, step)
        assert are_equal(weights_of(replayed, step), weights_of(recorded, step))
    assert not are_equal(weights_of(recorded, 1), weights_of(recorded, STEPS)), "nothing was learned"


@pytest.mark.full("test_a_replay_of_an_asynchronous_run_has_its_weights_bit_for_bit_without_an_engine in this file")
def test_a_replay_validates_with_an_engine_and_has_the_scores_of_the_recorded_run(run, started):
    changes = {"grpo": {"val_period": 2}, "data": {"validation": {"dataset_name": "arithmetic", "num_samples": 8}}}
    folders = [recorded := run("recorded", changes), run("recorded", changes, replay=recorded)]
    assert sorted(started) == ["environments"] * 2 + ["generation"] * 2
    rows = [read_jsonl(folder / "metrics.jsonl") for folder in folders]
    scores = [{row["step"]: row["validation/reward"] for row in each if "validation/reward" in row} for each in rows]
    assert scores[0] == scores[1]
    assert len(scores[0]) > 1
