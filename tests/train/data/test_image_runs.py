"""Runs whose data has images: which models, backends and processors they need, and when this is checked."""

import json
from pathlib import Path

import pytest
from PIL import Image
from tiny_processors import write_processor

from rl_core.errors import ConfigError, DataError
from rl_core.plugins.component import Capability
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.assembly.preparation import Preparation
from rl_train.config.loader import load_config


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry(discover())


@pytest.fixture
def able(registry, monkeypatch):
    """All backends support images."""
    find = registry.find

    def found(kind, name, *, requires=()):
        return find(kind, name, requires=[each for each in requires if each != Capability.IMAGES])

    monkeypatch.setattr(registry, "find", found)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_processor(folder, "qwen2_5_vl")
    return folder


ROW = {"question": "What is it?", "answer": "a square", "images": ["square.png"]}


def config_of(folder: Path, model: Path, registry, *rows: dict, backend: str = "hf", **data):
    Image.linear_gradient("L").save(folder / "square.png")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or [ROW] * 4))
    dataset = {"dataset_name": "jsonl", "path": "rows.jsonl", "response_key": "answer", "output_key": None}
    sections = {
        "sft": {"max_num_steps": 2, "global_batch_size": 2},
        "policy": {
            "backend": backend,
            "model_name": str(model),
            "max_total_sequence_length": 128,
            "train_global_batch_size": 2,
        },
        "cluster": {"backend": "in_process"},
        "data": {"train": dataset | data},
    }
    (folder / "config.yaml").write_text(json.dumps(sections))
    return load_config(folder / "config.yaml", [], registry=registry).run


@pytest.mark.usefixtures("able")
def test_the_rows_of_a_run_have_their_images(tmp_path, model, registry):
    prepared = Preparation(config_of(tmp_path, model, registry), registry)
    batch = prepared.loaders.batches.take(2)
    assert [len(images) for images in batch["images"]] == [1, 1]
    assert batch["images"][0][0].inputs is batch["images"][1][0].inputs


def test_a_backend_without_images_is_refused_before_a_model_is_loaded(tmp_path, model, registry):
    prepared = Preparation(config_of(tmp_path, model, registry, backend="megatron"), registry)
    with pytest.raises(
        ConfigError, match=r"Rows of the data have images, which policy cannot use.*capability.*images"
    ) as caught:
        _ = prepared.loaders
    assert caught.value.key == "policy.backend"


def test_rows_of_text_need_no_capability(tmp_path, model, registry):
    run = config_of(tmp_path, model, registry, backend="megatron", images_key=None)
    assert "images" not in Preparation(run, registry).loaders.batches.take(2)


@pytest.mark.usefixtures("able")
def test_images_for_a_model_of_text_are_one_error(tmp_path, registry):
    text_model = Path(__file__).parents[3] / "examples" / "addition" / "model"
    prepared = Preparation(config_of(tmp_path, text_model, registry), registry)
    with pytest.raises(ConfigError, match=r"is a model of text.*images_key: null"):
        _ = prepared.loaders


@pytest.mark.usefixtures("able")
def test_bad_pictures_are_bad_rows_with_their_locations(tmp_path, model, registry):
    missing, broken = ROW | {"images": ["missing.png"]}, ROW | {"images": ["broken.png"]}
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    rows = [ROW, ROW, missing, broken, ROW, ROW]
    with pytest.raises(DataError) as caught:
        _ = Preparation(config_of(tmp_path, model, registry, *rows), registry).loaders
    text = str(caught.value)
    assert "2 of 6 checked rows" in text
    assert f"rows.jsonl:3: image 0: the file 'missing.png', from the folder of the data ({tmp_path}) cannot be read" in text
    assert "rows.jsonl:4: image 0 (broken.png): it is" in text
    skipping = Preparation(config_of(tmp_path, model, registry, *rows, on_bad_row="skip"), registry)
    assert skipping.loaders.metrics()["data/bad_rows"] == 2
    assert len(skipping.loaders.batches.rows) == 4


@pytest.mark.usefixtures("able")
def test_a_resumed_run_notices_other_pictures(tmp_path, model, registry):
    before = Preparation(config_of(tmp_path, model, registry), registry).data.train.records.fingerprint
    moved = tmp_path / "moved"
    moved.mkdir()
    run = config_of(moved, model, registry)
    assert Preparation(run, registry).data.train.records.fingerprint == before
    (moved / "square.png").write_bytes(b"another picture")
    assert Preparation(run, registry).data.train.records.fingerprint != before
