"""Short runs of the quickstart's model in float32 at a large learning rate, in which every row has a gradient."""

from pathlib import Path

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"

RUN = {
    "grpo": {
        "num_prompts_per_step": 8,
        "num_generations_per_prompt": 4,
        "max_num_steps": 3,
        "seed": 4,
        "adv_estimator": {"name": "reinforce_plus_plus"},
    },
    "policy": {
        "backend": "hf",
        "model_name": str(MODEL),
        "max_total_sequence_length": 16,
        "train_global_batch_size": 32,
        "train_micro_batch_size": 4,
        "logprob_batch_size": 4,
        "optimizer": {"kwargs": {"lr": 0.01}},
        "generation": {"backend": "hf", "max_new_tokens": 5},
    },
    "data": {"train": {"dataset_name": "arithmetic", "num_samples": 40}},
    "env": {"arithmetic": {"num_workers": 1}},
    "cluster": {"backend": "in_process"},
    "checkpointing": {"enabled": False},
}


def merged(base, changes):
    out = dict(base)
    for key, value in changes.items():
        out[key] = merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out
