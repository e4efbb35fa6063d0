"""What a run reads before its processes start: datasets, batch sizes, and the settings that follow from the data."""

import json
from pathlib import Path

import pytest

from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.assembly.preparation import Preparation
from rl_train.config.loader import load_config

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"


@pytest.fixture(scope="module")
def prepare():
    """Prepares a run of GRPO with a training and a validation set."""
    registry = Registry(discover())

    def of(*, train: dict, validation: dict, env: dict, **grpo) -> Preparation:
        sections = {
            "grpo": {"num_prompts_per_step": 3, "num_generations_per_prompt": 4, **grpo},
            "policy": {
                "backend": "hf",
                "model_name": str(MODEL),
                "max_total_sequence_length": 32,
                "generation": {"backend": "hf", "max_new_tokens": 4},
            },
            "data": {"train": train, "validation": validation},
            "env": env,
        }
        return Preparation(load_config(sections, registry=registry).run, registry)

    return of


def test_validation_data_is_read_only_if_the_run_validates(prepare):
    both = {"train": {"dataset_name": "arithmetic"}, "validation": {"dataset_name": "arithmetic"}, "env": {"arithmetic": {}}}
    assert prepare(**both).data.validation == {}
    assert list(prepare(**both, val_at_end=True).data.validation) == [""]


def test_a_batch_has_the_prompts_of_a_step_and_not_its_samples(prepare):
    arithmetic = {"dataset_name": "arithmetic"}
    loaders = prepare(train=arithmetic, validation=arithmetic, env={"arithmetic": {}}).loaders
    assert len(next(iter(loaders.prompts))) == 3


def test_the_format_of_completions_follows_from_the_training_data_also_without_validation(prepare, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "1+1="}]}) + "\n")
    rows = {"dataset_name": "jsonl", "path": str(tmp_path / "rows.jsonl"), "input_key": "prompt", "output_key": None}
    prepared = prepare(train=rows, validation=rows, env={"sums": {"reward_fn": "builtins.repr"}})
    assert prepared.with_completion_formats(prepared.config).env["sums"].completion_format == "messages"
