"""Whole runs with a prompt sampler: it sees real rewards, and a resumed run equals an uninterrupted one bit for bit."""

import json
import shutil
from pathlib import Path

import pytest
from e2e_runs import TINY, merged
from safetensors.torch import load_file

from rl_core.errors import ConfigError
from rl_train.launch.train import train
from rl_train.metrics.jsonl import read_jsonl

STEPS = 4
BAND = {"name": "pass_rate_band", "low": 0.1, "high": 0.9}
OWN = {"name": "acme_sampler.LowestFirst"}
EXACT = {"rollout": {"max_staleness": 2, "order": "exact"}, "loss_fn": {"ratio_to": "sampler"}}
EXACT |= {"cluster": {"backend": "ray", "workers_per_node": 1, "use_gpus": False}}


@pytest.fixture
def run(tmp_path):
    """Runs a changed tiny config; returns the run folder."""

    def start(name, sampler, changes=None, **options):
        config = merged(TINY, {"grpo": {"max_num_steps": STEPS}, "checkpointing": {"save_period": 1}})
        config = merged(config, {"cluster": {"backend": "in_process"}, "logger": {"log_dir": str(tmp_path), "run_name": name}})
        config = merged(config, {"data": {"train": {"min_digits": 2}, "sampler": sampler}})
        path = tmp_path / f"{name}.yaml"
        path.write_text(json.dumps(merged(config, changes or {})))
        return train(path, console=False, **options).folder

    return start


def weights_of(folder, step):
    [file] = (folder / "checkpoints" / f"step_{step:06d}").glob("policy/weights/*.safetensors")
    return load_file(file)


def trained(folder, step):
    keys = ("index", "ordinal", "sample", "tokens", "logprobs", "reward")
    return [[row[key] for key in keys] for row in read_jsonl(folder / "rollouts" / f"step_{step:06d}.jsonl")]


def recorded(folder, step):
    row = next(row for row in read_jsonl(folder / "metrics.jsonl") if row["step"] == step)
    return {name: value for name, value in row.items() if name.startswith("data/sampler/")}


def assert_resumed_run_is_equal(run, tmp_path, sampler, changes, *, after):
    whole = run("whole", sampler, changes)
    stopped, checkpoint = tmp_path / "stopped", Path("checkpoints") / f"step_{after:06d}"
    shutil.copytree(whole / checkpoint, stopped / checkpoint)
    assert run("whole", sampler, changes, resume=str(stopped)) == stopped
    for step in range(after + 1, STEPS + 1):
        assert trained(whole, step) == trained(stopped, step)
        assert recorded(whole, step) == recorded(stopped, step)
        one, other = weights_of(whole, step), weights_of(stopped, step)
        assert all(tensor.equal(other[name]) for name, tensor in one.items())
    return whole


def test_a_resumed_run_with_a_sampler_given_by_its_path_equals_an_uninterrupted_one(run, tmp_path):
    whole = assert_resumed_run_is_equal(run, tmp_path, OWN, {}, after=2)
    rewards = {}
    for step in range(1, STEPS):
        for index, *_, reward in trained(whole, step):
            rewards.setdefault(index, []).append(reward)
    # It draws rows with a mean below 0.5 again, before those that it has not drawn.
    again = {index for index, *_ in trained(whole, STEPS)} & rewards.keys()
    assert again
    assert {index for index, each in rewards.items() if sum(each) == 0} & again
    assert recorded(whole, STEPS)["data/sampler/epochs"] == STEPS * 4 / 40


@pytest.mark.slow
def test_a_resumed_asynchronous_run_with_a_band_equals_an_uninterrupted_one_bit_for_bit(run, tmp_path, local_ray):
    whole = assert_resumed_run_is_equal(run, tmp_path, BAND, EXACT, after=2)
    assert (whole / "checkpoints" / "step_000002" / "rollouts" / "groups.json").exists()
    # The last prompts were drawn with the rewards of the first step.
    assert recorded(whole, STEPS)["data/sampler/tried_frac"] == 4 / 40


def test_a_sampler_that_raises_during_the_run_ends_it_with_its_name_and_line(run, monkeypatch):
    monkeypatch.setattr("acme_sampler.LowestFirst.observe", lambda self, results: results[0].reward)
    with pytest.raises(ConfigError, match=r"The prompt sampler acme_sampler\.LowestFirst: `observe` raised AttributeError"):
        run("raising", OWN)
