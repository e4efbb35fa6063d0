"""Runs of the example with pictures: each is encoded once for all samples of its prompt, and the canary covers the tower."""

import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

sys.path.append(str(Path(__file__).parents[1]))

import whole_vlms

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_core.data.tokenizer import load_tokenizer
from rl_core.errors import WeightSyncError
from rl_train.config.data_sections import ImagesConfig
from rl_train.data.image_sources import ImageSource
from rl_train.data.images import ImageReader
from rl_train.weight_sync.canary import make_canary

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = str(EXAMPLES / "pictures" / "model")


@pytest.fixture(scope="module")
def pictures():
    tokenizer = load_tokenizer(MODEL)
    reader = ImageReader(MODEL, ImagesConfig())
    tokenizer.image_reader = reader
    assert reader.random_pictures(2, tokenizer) == [], "no row has an image so far"
    reader.read([ImageSource(Image.new("RGB", (48, 48)))], tokenizer)
    return reader.random_pictures(2, tokenizer)


def canary_of(pictures, *, num_receivers=1, max_length=48, **options):
    return make_canary(
        range(5, 250), num_receivers=num_receivers, max_length=max_length, exact=True, pictures=pictures, **options
    )


def test_rows_of_each_replica_have_pictures_and_text_that_fit(pictures):
    assert pictures[0][1].digest != pictures[1][1].digest
    for receivers in range(1, 9):
        canary = canary_of(pictures, num_receivers=receivers, max_length=20)
        for rows in (canary.rows, canary.more_rows):
            assert int((rows["input_lengths"] + rows["max_new_tokens"]).max()) <= 20
            with_picture = [row for row, images in enumerate(rows["images"]) if images]
            assert len(with_picture) == rows.size // 2
            for row in with_picture:
                [image] = rows["images"][row]
                ids = rows["input_ids"][row, : rows["input_lengths"][row]]
                assert int((ids[image.start : image.end] == image.placeholder_id).sum()) == image.num_placeholders
                assert len(ids) > image.end
        for replica in range(receivers):
            assert any(canary.rows["images"][4 * replica : 4 * replica + 4])
    assert "images" not in canary_of((), max_length=20).rows
    assert "images" not in canary_of(pictures, max_length=7).rows, "no picture fits"


def test_a_tower_that_differs_from_that_of_the_policy_fails_the_canary(pictures):
    policy = HuggingFacePolicy(MODEL, max_total_sequence_length=48)
    engine = HuggingFaceGeneration(MODEL, max_new_tokens=5, max_model_len=48)
    try:
        for scored_rows in (0, 32):
            assert canary_of(pictures, scored_rows=scored_rows).check(policy, engine, thorough=True) < 1e-5
        with torch.no_grad():
            for tensor in engine.group.worker.model.model.visual.parameters():
                tensor.mul_(1.05)
        assert canary_of(()).check(policy, engine) < 1e-5, "rows of text say nothing about the tower"
        with pytest.raises(WeightSyncError, match="canary tokens they differ by"):
            canary_of(pictures).check(policy, engine)
    finally:
        engine.shutdown()
        policy.shutdown()


@pytest.mark.parametrize(("updates", "passes"), [(1, 2), (2, 3)])
def test_a_picture_is_encoded_once_for_the_samples_of_its_prompt(rlcore, tmp_path, monkeypatch, updates, passes):
    steps, prompts, samples = 2, 4, 8
    config = {
        "defaults": str(EXAMPLES / "grpo_pictures.yaml"),
        "grpo": {"num_prompts_per_step": prompts, "num_generations_per_prompt": samples, "max_num_steps": steps}
        | {"val_period": 0, "val_at_start": False, "val_at_end": False},
        "policy": {
            "model_name": MODEL,
            "train_global_batch_size": prompts * samples // updates,
            "train_micro_batch_size": prompts * samples,
            "logprob_batch_size": prompts * samples,
            "generation": {"refit_canary": False},
        },
        "data": {"check_rows": 8},
        "checkpointing": {"enabled": False, "metric_name": None, "keep_top_k": None},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    monkeypatch.syspath_prepend(EXAMPLES)
    encoded, encode = [], Qwen2_5_VisionTransformerPretrainedModel.forward

    def counted(self, hidden_states, grid_thw, **kwargs):
        encoded.append(len(grid_thw))
        return encode(self, hidden_states, grid_thw, **kwargs)

    monkeypatch.setattr(Qwen2_5_VisionTransformerPretrainedModel, "forward", counted)
    code, output = rlcore("train", str(tmp_path / "run.yaml"), folder=tmp_path)
    assert code == 0, output
    # Sampling, scoring if a step is several updates, and training, without prompts whose samples have equal rewards.
    assert encoded[0] == max(encoded) == prompts, encoded
    assert sum(encoded) <= steps * passes * prompts


def test_idefics_3_trains_by_grpo_on_drawn_pictures(rlcore, tmp_path, monkeypatch):
    whole_vlms.write(tmp_path / "model", "idefics3")
    (tmp_path / "varied.py").write_text(
        "from itertools import cycle\nr = cycle((0.0, 0.5, 1.0))\ndef reward(**_):\n    return next(r)\n"
    )
    config = {
        "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_num_steps": 2, "val_period": 0},
        "policy": {
            "backend": "hf",
            "model_name": "model",
            "max_total_sequence_length": 96,
            "optimizer": {"kwargs": {"lr": 1e-3}},
            "generation": {"backend": "hf", "max_new_tokens": 4},
        },
        **SAMPLES,
        "env": {"shapes": {"reward_fns": {"varied": "varied.reward"}}},
        "cluster": {"backend": "in_process"},
        "checkpointing": {"save_period": 2},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    monkeypatch.syspath_prepend(EXAMPLES)
    code, output = rlcore("train", str(tmp_path / "run.yaml"), folder=tmp_path)
    assert code == 0, output
    metrics = [json.loads(line) for line in (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(step["grad_norm"] > 0 and step["mismatch/max"] < 1e-4 for step in metrics)
    [weights] = (tmp_path / "runs" / "run").glob("checkpoints/step_000002/**/model.safetensors")
    before, after = load_file(tmp_path / "model" / "model.safetensors"), load_file(weights)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert {"vision_model", "connector", "text_model"} <= {part for name in changed for part in name.split(".")}


def asked(path):
    """The messages of a prompt with a picture."""
    content = [{"type": "image", "path": path}, {"type": "text", "text": "What color is the left shape?"}]
    return [{"role": "user", "content": content}]


def said(text):
    return [{"role": "assistant", "content": text}]


PAIRS = {"dataset_name": "preference", "path": "pairs.jsonl"}
VALUE = {"backend": "hf", "model_name": MODEL, "max_total_sequence_length": 48}
ALGORITHMS = {
    "sft": {"sft": {"global_batch_size": 4}, "data": {"train": {"dataset_name": "jsonl", "path": "talks.jsonl"}}},
    "dpo": {"dpo": {"global_batch_size": 4}, "loss_fn": {"name": "dpo"}, "data": {"train": PAIRS}},
    "rm": {"rm": {"global_batch_size": 4}, "data": {"train": PAIRS}},
    "kto": {
        "kto": {"global_batch_size": 4},
        "loss_fn": {"name": "kto"},
        "data": {"train": {"dataset_name": "preference", "path": "labelled.jsonl", "label_key": "label"}},
    },
    "ppo": {"ppo": {"num_prompts_per_step": 4, "ppo_epochs": 2}, "value": {**VALUE, "train_global_batch_size": 4}},
    "distillation": {"distillation": {"num_prompts_per_step": 4}, "loss_fn": {"topk": 4}, "teacher": VALUE},
}
SAMPLES = {
    "data": {"train": {"dataset_name": "pictures.shapes.TwoShapes", "size": 16}},
    "env": {"shapes": {"reward_fns": {"correct": "pictures.shapes.correct"}}},
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithms_train_on_rows_with_images(rlcore, tmp_path, monkeypatch, algorithm):
    for number, color in enumerate(("red", "green", "blue", "black")):
        Image.new("RGB", (48, 32 + 16 * (number % 2)), color).save(tmp_path / f"{color}.png")
        rows = {
            "talks": {"messages": asked(f"{color}.png") + said(color)},
            "pairs": {"prompt": asked(f"{color}.png"), "chosen": said(color), "rejected": said("yellow")},
            "labelled": {"prompt": asked(f"{color}.png"), "completion": said(color), "label": number % 2 == 0},
        }
        for name, row in rows.items():
            with (tmp_path / f"{name}.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
    config = ALGORITHMS[algorithm]
    samples = algorithm in ("ppo", "distillation")
    policy = {**VALUE, "train_global_batch_size": 4, "optimizer": {"kwargs": {"lr": 1e-3}}}
    config = {
        **(SAMPLES if samples else {}),
        **config,
        "policy": {**policy, **({"generation": {"backend": "hf", "max_new_tokens": 3}} if samples else {})},
        algorithm: {**config[algorithm], "max_num_steps": 2, "max_num_epochs": 2},
        "cluster": {"backend": "in_process"},
        "checkpointing": {"enabled": False},
    }
    if algorithm == "sft":
        config["data"]["train"] |= {"input_key": "messages", "output_key": None}
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    monkeypatch.syspath_prepend(EXAMPLES)
    code, output = rlcore("train", str(tmp_path / "run.yaml"), folder=tmp_path)
    assert code == 0, output
    metrics = [json.loads(line) for line in (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["grad_norm"] > 0 for step in metrics] == [True, True]
