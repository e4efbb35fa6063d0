"""Run folders for the tests of report and compare: synthetic ones of any size, and those of real runs; configs of NeMo RL."""

import json
import math
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from nemo_rl_configs import write_configs

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def nemo_rl(tmp_path_factory):
    """A folder with NeMo RL configs, by the names in `nemo_rl_configs.FILES`."""
    folder = tmp_path_factory.mktemp("nemo_rl")
    write_configs(folder)
    return folder


@pytest.fixture(scope="session")
def write_run():
    """Write a run folder; every file can be omitted (None) or replaced."""

    def write(folder, *, steps=5, rows=4, metrics=None, record=None, texts=None, **files):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rollouts").mkdir(exist_ok=True)
        lines = [metric_row(step) | (metrics(step) if metrics else {}) for step in range(1, steps + 1)]
        write_lines(folder / "metrics.jsonl", lines)
        for step in range(1, steps + 1) if rows else ():
            group = [(record or rollout)(step, row) for row in range(rows)]
            write_lines(folder / "rollouts" / f"step_{step:06d}.jsonl", group)
        if texts is not None:
            write_lines(folder / "rollouts" / "token_texts.jsonl", [{"id": i, "text": text} for i, text in texts.items()])
        content = {
            "status.json": {"state": "finished", "steps": steps},
            "config.yaml": {"grpo": {"max_num_steps": steps, "seed": 3}, "env": {}},
            "provenance.json": {
                "file": "sums.yaml",
                "overrides": ["grpo.seed=3"],
                "values": {
                    "grpo.max_num_steps": {"kind": "file", "source": "sums.yaml:2:3"},
                    "grpo.seed": {"kind": "override", "source": "override #1 `grpo.seed=3`"},
                    "env": {"kind": "default", "source": "default of RunConfig"},
                },
            },
            "environment.json": {
                "python": "3.11.7",
                "plugins": {"hf": "rl-backends-hf 0.1.0"},
                "distributions": {"torch": "2"},
            },
        }
        for name, value in (content | {f"{key}{end(key)}": value for key, value in files.items()}).items():
            if value is None:
                (folder / name).unlink(missing_ok=True)
            else:
                replace_text(folder / name, yaml.safe_dump(value) if name.endswith("yaml") else json.dumps(value))
        return folder

    return write


@pytest.fixture(scope="session")
def real_run(tmp_path_factory):
    """Four steps of the quickstart with every logger, in this process."""
    from rl_train.launch.train import train

    folder = tmp_path_factory.mktemp("real")
    config = folder / "sums.yaml"
    loggers = "{tensorboard: {}, wandb: {}, mlflow: {}}"
    config.write_text(f"defaults: {ROOT}/examples/grpo_addition.yaml\nlogger:\n  loggers: {loggers}\n")
    overrides = {
        "grpo.max_num_steps": 4,
        "grpo.val_period": 2,
        "grpo.num_prompts_per_step": 8,
        "grpo.val_batch_size": 32,
        "grpo.max_val_samples": 32,
        "policy.train_global_batch_size": 32,
        "loss_fn.reference_policy_kl_penalty": 0.01,
        "cluster.backend": "in_process",
        "logger.log_dir": str(folder),
        "logger.run_name": "run",
    }
    return train(config, [f"{key}={value}" for key, value in overrides.items()], console=False).folder


@pytest.fixture(scope="session")
def real_sft_run(tmp_path_factory):
    """Two steps of supervised training on the same model."""
    from rl_train.launch.train import train

    folder = tmp_path_factory.mktemp("sft")
    overrides = {
        "sft.max_num_steps": 2,
        "sft.val_period": 2,
        "sft.max_val_samples": 32,
        "policy.model_name": f"{ROOT}/examples/addition/model",
        "data.train.num_samples": 200,
        "data.validation.num_samples": 32,
        "cluster.backend": "in_process",
        "logger.log_dir": str(folder),
    }
    return train(
        ROOT / "examples" / "sft_addition.yaml", [f"{key}={value}" for key, value in overrides.items()], console=False
    ).folder


def end(name):
    return ".yaml" if name == "config" else ".json"


def write_lines(path, rows):
    replace_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def replace_text(path, text):
    """Write the file in one step, as a run does, because `rlcore watch` may read it at any time."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


def metric_row(step):
    return {
        "step": step,
        "reward/mean": 1 - math.exp(-step / 10),
        "entropy/sampled": 1 / step,
        "num_optimizer_steps": 2.0,
        "time/rollout_s": 1.0,
        "time/train_s": 2.0,
        "time/step_s": 3.5,
        "rollout/rows": 4.0,
    }


def rollout(step, row):
    return {
        "task": "sums",
        "index": 7,
        "group": row // 2,
        "sample": row % 2,
        "prompt": f"{step}+1=",
        "completion": "the sum",
        "messages": [],
        "answer": "the sum",
        "tokens": [1, 2, 3],
        "logprobs": [-0.5, -1.25, -0.125],
        "reward": float(row % 2),
        "reward_parts": {"reward": float(row % 2)},
        "advantage": row % 2 - 0.5,
        "truncated": False,
        "turns": 1,
        "weight_version": 2 * (step - 1),
    }
