"""Runs on games of other libraries, in worker processes of Ray and in this process."""

import json
import shutil

import pytest
from e2e_runs import MODEL

from rl_train.launch.train import train

GAMES = {
    "gymnasium": {"id": "Taxi-v4", "observation": "value", "action_tag": None, "max_moves": 3},
    "textarena": {"id": "GuessTheNumber-v0", "max_moves": 2},
    "skyrl_gym": {"id": "gsm8k_multi_turn"},
}


@pytest.fixture
def model(tmp_path):
    """The model of the quickstart with room for the texts of games."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 1024}))
    return folder


@pytest.mark.parametrize("name", GAMES)
def test_three_steps_train_on_games_of_another_library(name, model, tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        "".join(
            json.dumps({"prompt": f"{n}+1=", "reward_spec": {"ground_truth": str(n + 1)}, "extra_info": {"max_turns": 2}})
            + "\n"
            for n in range(8)
        )
    )
    rows = {
        "dataset_name": "jsonl",
        "path": str(tmp_path / "rows.jsonl"),
        "input_key": "prompt",
        "output_key": None,
        "env_keys": ["reward_spec", "extra_info"],
    }
    seeds = {"dataset_name": "text_game", "num_samples": 8, "question": "1+1="}
    config = {
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 3},
        "policy": {
            "backend": "hf",
            "model_name": str(model),
            "max_total_sequence_length": 1024,
            "generation": {"backend": "hf", "max_new_tokens": 4},
        },
        "data": {"train": rows if name == "skyrl_gym" else seeds},
        "env": {name: GAMES[name]},
        "cluster": {"backend": "in_process"},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(tmp_path / "runs")},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    train(tmp_path / "config.yaml", resume="never", console=False)
    rollouts = [
        json.loads(line)
        for path in sorted(tmp_path.glob("runs/*/rollouts/step_*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    assert len(rollouts) == 12
    assert all(row["scored"] and "game" in row["reward_parts"] for row in rollouts)
