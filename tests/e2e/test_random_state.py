"""Runs with equal configs are equal, also with dropout and with components that draw from global generators; so are resumes."""

import dataclasses
import json
import random
import shutil
import sys

import numpy
import pytest
import torch
from e2e_runs import MODEL, TINY, merged, reproducible_metrics_of
from ray import cloudpickle

from rl_backends_base.distributed_generation import DistributedGeneration
from rl_backends_hf.config import HFGenerationConfig
from rl_backends_hf.generation import HFGenerationWorker
from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_train.evaluation.evaluate import plan_evaluation
from rl_train.launch.train import train

DRAWS = """
import random
import numpy, torch
from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.policy import HuggingFacePolicy

class DrawingPolicy(HuggingFacePolicy):
    '''Written elsewhere; it draws from the generators of the process and does not save their states.'''

    def __init__(self, *, config, cluster=None, deadlines=None):
        super().__init__(config=HFPolicyConfig.model_validate(config.model_dump()), cluster=cluster, deadlines=deadlines)

    def train(self, data, loss_fn, **options):
        result = super().train(data, loss_fn, **options)
        draws = {"draw/python": random.random(), "draw/numpy": float(numpy.random.rand()), "draw/torch": float(torch.rand(()))}
        return {**result, "metrics": {**result["metrics"], **draws}}

    def load_checkpoint(self, weights_path, optimizer_path=None, **kwargs):
        states = random.getstate(), torch.get_rng_state()
        super().load_checkpoint(weights_path, optimizer_path, **kwargs)
        random.setstate(states[0])
        torch.set_rng_state(states[1])
"""
SFT = {
    "sft": {"global_batch_size": 8, "max_num_steps": 2, "seed": 5},
    "policy": {
        "backend": "hf",
        "model_name": str(MODEL),
        "max_total_sequence_length": 16,
        "hf_cfg": {"lora": {"rank": 4, "dropout": 0.5}},
        "optimizer": {"kwargs": {"lr": 1.0e-3}},
    },
    "data": {"train": {"dataset_name": "arithmetic", "num_samples": 40, "with_response": True}},
    "checkpointing": {"save_period": 1, "keep_latest_k": 2},
}
IN_PROCESS = {"cluster": {"backend": "in_process"}, "policy": {"backend": "drawing_policy.DrawingPolicy"}}
TWO_RANKS = {"cluster": {"backend": "ray", "workers_per_node": 2}}
GRPO = merged(
    TINY,
    {
        "grpo": {"max_num_steps": 2, "val_at_start": True, "val_batch_size": 8},
        "policy": {"generation": {"backend": "sampling.SamplingEngine"}},
        "data": {"validation": {"dataset_name": "arithmetic", "num_samples": 8, "split": "validation"}},
        "checkpointing": {"save_period": 1},
    },
)


class Sampler(HFGenerationWorker):
    """Ignores the seeds of the rows: it samples with the generators of the process."""

    def generate(self, data, *, greedy=False):
        draws = [random.getrandbits(60) ^ numpy.random.randint(2**60) ^ int(torch.randint(2**60, ())) for _ in range(data.size)]
        data["sample_seeds"] = torch.tensor(draws)
        return super().generate(data, greedy=greedy)


class SamplingEngine(DistributedGeneration):
    """An engine of such replicas."""

    capabilities = ("in_process", "shared_memory", "held_weight_digests")
    streams_rows = False

    def __init__(self, *, config, **kwargs):
        super().__init__(worker_class=Sampler, config=HFGenerationConfig(**{**dict(config), "backend": "hf"}), **kwargs)

    @property
    def tokenizer_section(self):
        return self.config.tokenizer


class StreamingSampler(Sampler):
    """Also draws the seed of each token of the rows in flight, so draws depend on the tokens that are sampled together."""

    def draw(self, rows, logits):
        for row, seed in zip(rows, torch.randint(2**60, (len(rows),)).tolist(), strict=True):
            row.prompt = dataclasses.replace(row.prompt, seed=seed)
        return super().draw(rows, logits)


class StreamingEngine(DistributedGeneration):
    """An engine of such replicas, whose rows of several turns join while others run."""

    capabilities = ("in_process", "async_rows", "shared_memory", "held_weight_digests")

    def __init__(self, *, config, **kwargs):
        config = HFGenerationConfig(**{**dict(config), "backend": "hf"})
        super().__init__(worker_class=StreamingSampler, config=config, **kwargs)

    @property
    def tokenizer_section(self):
        return self.config.tokenizer


class DrawingSums(EnvironmentInterface):
    """Ends each rollout at random after its first or second turn; its draws and those of the engine must not mix."""

    def __init__(self, config=None):
        pass

    def step(self, message_log_batch, metadata):
        rows = len(message_log_batch)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "1+2="}] * rows,
            metadata=metadata,
            next_stop_strings=[None] * rows,
            rewards=torch.rand(rows),
            terminateds=torch.rand(rows) < 0.5,
        )


@pytest.fixture
def run_and_resume(tmp_path, monkeypatch):
    """Runs a config, and resumes a copy of the run after its first step: the config file and the metrics of both."""
    (tmp_path / "drawing_policy.py").write_text(DRAWS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "sampling", sys.modules[__name__])
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a module of tests

    def run(base, changes):
        path = tmp_path / "run.yaml"
        path.write_text(json.dumps(merged(base, merged(changes, {"logger": {"log_dir": str(tmp_path / "runs")}}))))
        first = train(path, console=False).folder
        stopped = tmp_path / "runs" / "stopped"
        shutil.copytree(first / "checkpoints" / "step_000001", stopped / "checkpoints" / "step_000001")
        shutil.copy(first / "metrics.jsonl", stopped)
        train(path, console=False, resume=str(stopped))
        return path, [reproducible_metrics_of(tmp_path, name) for name in (first.name, "stopped")]

    yield run
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def run_twice(run_and_resume, tmp_path):
    """Also runs the config again, and with another seed."""

    def run(changes):
        path, metrics = run_and_resume(SFT, changes)
        names = [train(path, overrides, console=False, resume="never").folder.name for overrides in ((), ("sft.seed=6",))]
        return metrics + [reproducible_metrics_of(tmp_path, name) for name in names]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("changes", [IN_PROCESS, TWO_RANKS], ids=["in_process", "two ranks"])
def test_equal_configs_draw_equal_numbers_and_a_resumed_run_continues_them(run_twice, changes, local_ray):
    first, resumed, again, other_seed = run_twice(changes)
    assert first == again
    assert first == resumed
    drawn = [key for key in first[1] if key.startswith(("draw/", "grad_norm"))]
    assert len(drawn) == (4 if changes is IN_PROCESS else 1)
    for key in drawn:
        assert first[1][key] != first[2][key], key
        assert first[1][key] != other_seed[1][key], key


OVER_RAY = pytest.param("ray", marks=pytest.mark.full("core/cluster/test_seeds_of_calls.py has the seeds of calls on Ray"))


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["in_process", OVER_RAY])
def test_a_resumed_run_continues_the_samples_of_an_engine_that_draws_from_global_generators(run_and_resume, cluster, local_ray):
    path, (first, resumed) = run_and_resume(GRPO, {"cluster": {"backend": cluster}})
    sent = ("refit/moved", "refit/bytes")  # a resumed run sends all weights once
    for key in first[2].keys() - {*sent}:
        assert first[2][key] == resumed[2][key], key
    answers = [[group.answers for group in plan_evaluation(path).evaluate().passes[0].groups] for _ in range(2)]
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_equal_configs_sample_the_same_with_an_engine_in_this_process_that_streams_and_draws_from_global_generators(
    run_and_resume,
):
    changes = {
        "grpo": {"max_rollout_turns": 2, "val_at_start": False},
        "policy": {"max_total_sequence_length": 40, "generation": {"backend": "sampling.StreamingEngine"}},
        "env": {"arithmetic": {"env_cls": "sampling.DrawingSums"}},
        "cluster": {"backend": "in_process"},
        "data": {"validation": None},
        "checkpointing": {"metric_name": None},
    }
    path, (first, resumed) = run_and_resume(GRPO, changes)
    again = reproducible_metrics_of(path.parent, train(path, console=False, resume="never").folder.name)
    assert first == again
    assert first[1] != first[2]
    differing = {key: (value, resumed[2].get(key)) for key, value in first[2].items() if value != resumed[2].get(key)}
    assert not differing
