"""Whole runs: their output, rejected configs, and recovery from failures."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from e2e_runs import MODEL, ROOT, merged, metrics_of
from ray import cloudpickle

from rl_backends_hf import HuggingFaceGeneration
from rl_backends_hf.config import HFGenerationConfig
from rl_backends_hf.generation import HFGenerationWorker
from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_envs import ArithmeticEnvironment

pytestmark = pytest.mark.slow
IN_PROCESS = {"cluster": {"backend": "in_process"}}


def test_the_run_folder_records_config_metrics_and_environment(train_here, tmp_path):
    code, output = train_here(
        {
            **IN_PROCESS,
            "profiling": {"steps": [2]},
            "grpo": {"max_num_steps": 2, "val_at_start": True, "val_at_end": True, "max_val_samples": 8},
            "data": {"validation": {"dataset_name": "arithmetic", "num_samples": 8, "split": "validation"}},
        }
    )
    assert code == 0, output
    folder = tmp_path / "runs" / "run"
    steps = metrics_of(tmp_path)
    assert sorted(steps) == [0, 1, 2]
    assert {"reward/mean", "loss", "grad_norm", "mismatch/kl", "length/mean", "entropy/sampled"} <= set(steps[1])
    assert "validation/accuracy" in steps[0]
    assert "validation/accuracy" in steps[2]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {"time/refit_s", "time/rollout_s", "time/score_s", "time/train_s", "time/step_s", "tokens_per_s"} <= set(lines[1])
    rollouts = [json.loads(line) for line in (folder / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    assert len(rollouts) == 16
    assert {"prompt", "completion", "tokens", "logprobs", "advantage", "reward", "weight_version"} <= set(rollouts[0])
    assert [row["weight_version"] for row in rollouts] == [0] * 16
    assert (folder / "config.yaml").is_file()
    assert [each.name for each in (folder / "profile").iterdir()] == ["step_000002.json.gz"]
    assert (folder / "logs" / "driver.log").is_file()
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = folder / "checkpoints" / "step_000002" / "policy" / "weights"
    assert AutoModelForCausalLM.from_pretrained(weights).num_parameters() > 1e6
    assert AutoTokenizer.from_pretrained(weights).eos_token == "<eos>"


def test_the_epochs_end_a_run_that_would_have_more_steps(train_here, tmp_path):
    changes = {"grpo": {"max_num_steps": 50, "max_num_epochs": 1}, "data": {"train": {"num_samples": 12}}}
    code, output = train_here({**IN_PROCESS, **changes})
    assert code == 0, output
    assert sorted(metrics_of(tmp_path)) == [1, 2, 3]
    assert "3 steps done" in output


def test_plain_lines_are_printed_when_piped(train_here):
    code, output = train_here({**IN_PROCESS, "grpo": {"max_num_steps": 2}})
    assert code == 0, output
    steps = [line for line in output.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/2", "2/2"]
    assert "\x1b" not in output


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"policy": {"modle_name": "x"}}, "model_name"),
        ({"policy": {"model_name": "no/such/model"}}, "no/such/model"),
        ({"grpo": {"num_generations_per_prompt": 1}}, "Set at least 2"),
        ({"policy": {"generation": {"backend": "opneai"}}}, "Did you mean 'openai'?"),
        ({"env": {"arithmetic": None, "chess": {}}}, "chess"),
        ({"data": {"train": {"dataset_name": "arithmetic", "num_samples": 2}}}, "2 records"),
        ({"policy": {"max_total_sequence_length": 6}}, "6"),
    ],
    ids=["typo", "no such model", "group of one", "backend not installed", "unknown environment", "too little data", "no room"],
)
def test_a_wrong_config_ends_with_exit_code_2_and_no_traceback(train_here, changes, says):
    code, output = train_here({**IN_PROCESS, **changes})
    assert code == 2, output
    assert says in output
    assert "Traceback" not in output


def test_the_command_with_a_wrong_config_prints_only_the_error(train_here):
    code, output = train_here({**IN_PROCESS, "policy": {"modle_name": "x"}})
    assert code == 2, output
    assert output.startswith("error: "), output
    assert "Did you mean 'model_name'" in output


@pytest.fixture
def importable(monkeypatch):
    """Classes of this module are importable from `components` in configs, and travel to workers by value."""
    monkeypatch.setitem(sys.modules, "components", sys.modules[__name__])
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


class MortalEnvironment(ArithmeticEnvironment):
    """The processes of the first two calls die when both calls have begun."""

    def __init__(self, cfg):
        super().__init__({})
        self.called = Path(cfg["folder"]) / "called"

    def step(self, message_log_batch, metadata):
        with self.called.open("a") as file:
            file.write(f"{os.getpid()}\n")
        while len(calls := self.called.read_text().split()) < 2:
            time.sleep(0.02)
        if str(os.getpid()) in calls[:2]:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(message_log_batch, metadata)


@pytest.mark.full("train/rollouts/test_failures.py kills an environment's worker; train/pools/test_actor_pool.py repeats calls")
@pytest.mark.usefixtures("importable", "local_ray")
def test_kill_9_of_an_environment_worker_in_the_middle_of_a_step_completes_the_step(train_here, tmp_path):
    env = {"arithmetic": {"env_cls": "components.MortalEnvironment", "num_workers": 2, "folder": str(tmp_path)}}
    code, output = train_here({"env": env, "grpo": {"max_num_steps": 1}})
    assert code == 0, output
    assert metrics_of(tmp_path)[1]["rollout/rows"] == 16.0
    calls = (tmp_path / "called").read_text().split()
    assert len(set(calls[:2])) == 2
    assert len(calls) == 2 + 16  # after a failed call, each of its rows is repeated in a separate one
    assert not set(calls[2:]) & set(calls[:2])


@pytest.mark.full("test_trainers.py trains over two ranks as over one; backends_hf/test_policy_ranks.py has their gradients")
def test_two_data_parallel_ranks_take_the_same_steps_as_one(train_here, tmp_path, local_ray):
    changes = {"grpo": {"max_num_steps": 3}}
    code, output = train_here({**changes, **IN_PROCESS}, folder=tmp_path / "one")
    assert code == 0, output
    one_engine = {"policy": {"generation": {"num_workers": 1}}}  # backends_base proves that replicas sample the same rows
    code, output = train_here({**changes, **one_engine, "cluster": {"workers_per_node": 2}}, folder=tmp_path / "two")
    assert code == 0, output
    one, two = metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two")
    for step in one:
        # The same samples (tokens depend only on the row's seed) and the same gradient up to summation order.
        assert two[step]["reward/mean"] == one[step]["reward/mean"]
        assert two[step]["grad_norm"] == pytest.approx(one[step]["grad_norm"], rel=1e-3, abs=1e-6)


SHORTENING = (
    "{% for m in messages %}{{ m['content'][1:] if m['role'] == 'assistant' else m['content'] }}"
    "{{ eos_token if m['role'] == 'assistant' else '' }}{% endfor %}"
)
"""Drops the first character of earlier answers, as templates drop reasoning."""


class Sums(EnvironmentInterface):
    """Asks for one to three sums; each 1 of an answer is a point."""

    min_turns = 3

    def __init__(self, cfg=None):
        pass

    def step(self, message_log_batch, metadata):
        left = [state.get("left", int(state["expected_answer"]) % 3) for state in metadata]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": f"1{n}+2="} for n in left],
            metadata=[{**state, "left": n - 1} for state, n in zip(metadata, left, strict=True)],
            next_stop_strings=[None] * len(left),
            rewards=torch.tensor([float(log[-1]["content"].count("1")) for log in message_log_batch]),
            terminateds=torch.tensor([n == 0 for n in left]),
        )


@pytest.mark.full("test_segments.py has the rows of segments for any number of ranks; the test above trains over two ranks")
@pytest.mark.usefixtures("importable")
def test_rollouts_with_rewritten_history_take_the_same_steps_over_two_ranks_of_ray_as_in_process(
    train_here, tmp_path, local_ray
):
    changes = {
        "grpo": {"max_num_steps": 2},
        "rollout": {"history": "template"},
        "policy": {"max_total_sequence_length": 48, "tokenizer": {"chat_template": SHORTENING}},
        "data": {"train": {"task_name": "sums"}},
        "env": {"arithmetic": None, "sums": {"env_cls": "components.Sums", "num_workers": 1, "max_rollout_turns": 3}},
        "checkpointing": {"enabled": False},
    }
    code, output = train_here(merged(changes, IN_PROCESS), folder=tmp_path / "one")
    assert code == 0, output
    over_ray = {"env": {"sums": {"num_workers": 2}}, "policy": {"generation": {"num_workers": 1}}}
    over_ray["cluster"] = {"workers_per_node": 2}
    code, output = train_here(merged(changes, over_ray), folder=tmp_path / "two")
    assert code == 0, output
    one, two = metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two")
    assert one[1]["rollout/segments"] > 1.2
    for step in one:
        same = {name for name in one[step] if name.startswith(("rollout/", "reward/", "length/", "advantage/"))}
        assert {name: two[step][name] for name in same} == {name: one[step][name] for name in same}
        for name in ("loss", "grad_norm", "entropy/sampled", "mismatch/kl"):
            assert two[step][name] == pytest.approx(one[step][name], rel=1e-3, abs=1e-6), name
    for number in (1, 2):
        rows = [
            [json.loads(line) for line in (folder / "runs/run/rollouts" / f"step_{number:06}.jsonl").read_text().splitlines()]
            for folder in (tmp_path / "one", tmp_path / "two")
        ]
        assert [row["tokens"] for row in rows[0]] == [row["tokens"] for row in rows[1]]


def test_workers_of_ray_find_a_loss_by_its_path(rlcore, monkeypatch, tmp_path, local_ray):
    monkeypatch.syspath_prepend(str(ROOT))
    changes = ["sft.max_num_steps=1", "sft.val_period=0", "sft.val_at_start=false", "checkpointing.enabled=false"]
    names = [f"logger.log_dir={tmp_path / 'runs'}", "logger.run_name=run"]
    code, output = rlcore("train", "examples/custom_loss/train.yaml", *changes, *names, folder=ROOT)
    assert code == 0, output
    assert "loss/nll_of_answers" in metrics_of(tmp_path)[1]


class PoisonedWorker(HFGenerationWorker):
    """Changes one number of one tensor in the second refit."""

    def update_weights(self, ipc_handles):
        super().update_weights(ipc_handles)
        if ipc_handles["weight_version"] == 2:
            _, tensor = next(iter(self.named_weights().items()))
            tensor.data.view(-1)[7] += 1.0e-3


class PoisonedGeneration(HuggingFaceGeneration):
    capabilities = ("shared_memory",)

    def __init__(self, *, config, **options):
        super().__init__(config=HFGenerationConfig(**config.model_dump()), **options)


@pytest.mark.usefixtures("importable")
def test_a_tensor_corrupted_during_a_refit_stops_the_run(train_here, tmp_path, monkeypatch):
    monkeypatch.setattr("rl_backends_hf.generation.HFGenerationWorker", PoisonedWorker)
    code, output = train_here(
        {
            **IN_PROCESS,
            "policy": {"train_global_batch_size": 16},
            "grpo": {"max_num_steps": 6},
            "logger": {"loggers": {}},
        },
        "policy.generation.backend=components.PoisonedGeneration",
    )
    assert code == 1, output
    assert "differ from the policy's at version 2" in output, output
    assert sorted(metrics_of(tmp_path)) == [1, 2]


def test_multi_turn_rollouts_train_only_on_sampled_tokens(train_here, tmp_path):
    changes = {
        "data": {
            "train": {
                "dataset_name": "guess",
                "num_samples": 64,
                "lowest": 10,
                "highest": 99,
                "question": "{lowest}-{highest}=",
            }
        },
        "env": {"arithmetic": None, "guess": {"max_guesses": 3, "higher": "+", "lower": "-", "unreadable": "*"}},
        "grpo": {"max_num_steps": 2},  # as many turns as the game needs
        "policy": {"max_total_sequence_length": 64},
    }
    code, output = train_here({**IN_PROCESS, **changes})
    assert code == 0, output
    assert metrics_of(tmp_path)[1]["rollout/turns"] > 1
    [*rows] = (json.loads(line) for line in (tmp_path / "runs/run/rollouts/step_000001.jsonl").read_text().splitlines())
    longest = max(rows, key=lambda row: row["turns"])
    assert [m["role"] for m in longest["messages"]][:3] == ["user", "assistant", "environment"]


def test_an_example_of_supervised_training_lowers_the_held_out_loss(rlcore, tmp_path):
    code, output = rlcore(
        "train", str(Path(MODEL).parents[1] / "sft_addition.yaml"), f"policy.model_name={MODEL}", "sft.max_num_steps=8",
        "sft.global_batch_size=64", "sft.val_period=4", "sft.val_at_start=true",
        "cluster.backend=in_process", "data.train.forgotten_carries=0.0", "data.validation.forgotten_carries=0.0",
        "policy.optimizer.kwargs.lr=1e-4",
        folder=tmp_path,
    )  # fmt: skip
    assert code == 0, output
    steps = metrics_of(tmp_path, "sft_addition")
    assert steps[8]["validation/loss"] < steps[0]["validation/loss"]
