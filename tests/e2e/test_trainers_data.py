"""Data passed to trainers in Python takes the same steps as the same data in a config, in any form."""

import json

import datasets
import pytest
from datasets import Dataset
from e2e_runs import MEASURED, MODEL, merged, metrics_of

from rl_backends_hf import HuggingFacePolicy
from rl_core.errors import ConfigError
from rl_train.algorithms import DPOTrainer, SFTTrainer
from rl_train.launch.train import train

LIMITS = {"max_total_sequence_length": 16, "train_micro_batch_size": 8, "logprob_batch_size": 8}
SECTION = {"max_num_steps": 2, "global_batch_size": 8}


def kept(steps: list[dict]) -> list[dict]:
    return [{name: value for name, value in step.items() if not name.endswith(MEASURED)} for step in steps]


def trained(trainer, data, **given) -> list[dict]:
    policy = HuggingFacePolicy(str(MODEL), **LIMITS)
    try:
        return kept(trainer(policy, config=given.pop("config", SECTION)).train(data, **given))
    finally:
        policy.shutdown()


def by_config(folder, data, **section) -> list[dict]:
    config = {
        "policy": {"backend": "hf", "model_name": str(MODEL), **LIMITS},
        "cluster": {"backend": "in_process"},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(folder / "runs")},
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(merged(config, {**section, "data": data})))
    train(path, resume="never", console=False)
    steps = metrics_of(folder)
    return kept([{"step": step, **steps[step]} for step in sorted(steps)])


@pytest.fixture(autouse=True)
def library_cache(tmp_path, monkeypatch):
    """The cache of the library is removed with the tests."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def answered(tmp_path):
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    return rows


def test_a_prompt_sampler_in_the_data_of_a_trainer_that_does_not_sample_is_refused(answered):
    data = {"train": {"dataset_name": "arithmetic", "with_response": True}, "sampler": {"name": "pass_rate_band"}}
    with pytest.raises(ConfigError, match="sft does not sample prompts, so the section has no effect"):
        trained(SFTTrainer, data)


@pytest.mark.slow
def test_rows_tables_and_paths_take_the_steps_of_the_config(answered, tmp_path):
    section = {
        "dataset_name": "jsonl",
        "path": str(tmp_path / "rows.jsonl"),
        "input_key": "prompt",
        "response_key": "completion",
        "output_key": None,
    }
    wanted = by_config(tmp_path, {"train": section}, sft=SECTION)
    given = [answered, Dataset.from_list(answered), tmp_path / "rows.jsonl", str(tmp_path / "rows.parquet"), section]
    for data in given:
        assert trained(SFTTrainer, data) == wanted


def test_the_section_of_all_data_holds_rows_out_as_the_config_does(tmp_path):
    (tmp_path / "pairs.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "0"}) + "\n" for n in range(40))
    )
    data = {
        "train": {"dataset_name": "preference", "path": str(tmp_path / "pairs.jsonl")},
        "split": {"validation": 0.3, "seed": 1},
        "shuffle": False,
    }
    section = {**SECTION, "val_at_end": True}
    found = trained(DPOTrainer, data, config=section)
    assert found == by_config(tmp_path, data, dpo=section)
    assert "validation/loss" in found[-1]
    with pytest.raises(ConfigError, match="both set the validation data"):
        trained(DPOTrainer, data, config=section, validation=tmp_path / "pairs.jsonl")
