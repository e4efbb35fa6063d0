"""Validation data of which every row is dropped."""

import json
from pathlib import Path

from rl_train.launch.train import train

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"


def test_distillation_validates_without_a_loss_if_all_prompts_are_dropped(tmp_path, caplog):
    long, short = {"question": "1+2+3+4+5+6="}, {"question": "1+2="}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [long, long, short]))
    config = {
        "distillation": {"num_prompts_per_step": 2, "max_num_steps": 1, "val_at_start": True, "max_val_samples": 2},
        "policy": {
            "backend": "hf",
            "model_name": str(MODEL),
            "max_total_sequence_length": 16,
            "generation": {"backend": "hf", "max_new_tokens": 4, "val_temperature": 1.0},
        },
        "loss_fn": {"topk": 4},
        "teacher": {"backend": "hf", "model_name": str(MODEL), "max_total_sequence_length": 16},
        "data": {
            "train": {"dataset_name": "arithmetic", "num_samples": 8},
            "validation": {"dataset_name": "jsonl", "path": str(tmp_path / "rows.jsonl"), "output_key": None},
            "max_input_seq_length": 8,
            "on_long_prompt": "drop",
        },
        "cluster": {"backend": "in_process"},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(tmp_path / "runs"), "run_name": "run"},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    train(tmp_path / "run.yaml", console=False)
    first = json.loads((tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert "validation/loss" not in first
    assert first["validation/tokens"] == 0
    assert "all validation rows are dropped" in caplog.text
