"""Digests of models and files: what counts as a change, also of weights that are too large to be read as a whole."""

import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from rl_core.data import model_digests
from rl_core.data.model_digests import base_weights, path_digests, weights_digest

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"


@pytest.fixture
def model(tmp_path):
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


def changed(before, after):
    return sorted(name for name in {**before, **after} if before.get(name) != after.get(name))


@pytest.mark.parametrize("whole", [True, False])
def test_a_changed_tensor_and_a_changed_file_are_named(model, monkeypatch, whole):
    if not whole:
        monkeypatch.setattr(model_digests, "_WHOLE", 0)
    before = path_digests(str(model))
    weights = load_file(model / "model.safetensors")
    name = max(weights, key=lambda one: weights[one].numel())
    weights[name] = weights[name] + 1
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    (model / "tokenizer_config.json").write_text("{}")
    (model / "README.md").write_text("Notes")
    (model / "results.json").write_text("{}")
    after = path_digests(str(model))
    assert changed(before, after) == [f"tensor {name}", "tokenizer_config.json"]
    assert changed(base_weights(before), base_weights(after)) == [f"tensor {name}"]


def test_other_shards_of_the_same_weights_change_nothing(model):
    before = path_digests(str(model))
    weights = load_file(model / "model.safetensors")
    for number, name in enumerate(sorted(weights)):
        save_file({name: weights[name]}, model / f"part-{number}.safetensors")
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text("{}")
    assert path_digests(str(model)) == before


def test_a_change_at_any_end_of_a_large_tensor_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(model_digests, "_WHOLE", 0)
    tensor = torch.zeros(100_000)
    digests = []
    for index in (None, 0, -1):
        if index is not None:
            tensor[index] += 1
        save_file({"w": tensor}, tmp_path / "model.safetensors")
        digests.append(path_digests(str(tmp_path / "model.safetensors"))["tensor w"])
    assert len({*digests}) == 3


def test_other_texts_than_paths_have_no_digests():
    assert path_digests("generic/math") == {}
    assert path_digests("{% for message in messages %}{{ message['content'] }}\n{% endfor %}" * 100) == {}


@pytest.mark.parametrize("whole", [True, False])
def test_a_copy_of_a_model_has_the_same_digest_of_weights_and_a_changed_one_another(model, monkeypatch, whole):
    if not whole:
        monkeypatch.setattr(model_digests, "_WHOLE", 0)
    before = weights_digest(str(MODEL))
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    (model / "tokenizer_config.json").unlink()
    assert weights_digest(str(model)) == before
    weights = load_file(model / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, model / "model.safetensors")
    assert weights_digest(str(model)) not in (before, None)
    assert weights_digest("acme/absent") is None


def test_a_model_of_the_hub_has_the_digest_of_its_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    stored, commit = tmp_path / "models--acme--tiny", "a" * 40
    shutil.copytree(MODEL, stored / "snapshots" / commit)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(commit)
    assert weights_digest("acme/tiny") == weights_digest(f"acme/tiny@{commit}") == weights_digest(str(MODEL))
