"""Runs whose data has images: which models, backends and processors they need, and when this is checked."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image
from tiny_processors import write_processor

from rl_core.config.policy_sections import PolicyConfig
from rl_core.errors import ConfigError, DataError
from rl_core.plugins.component import Capability
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.assembly.preparation import Preparation
from rl_train.checkpoints.published_files import carry_over_tokenizer
from rl_train.config.data_sections import ImagesConfig
from rl_train.config.loader import load_config
from rl_train.data.image_sources import ImageSource
from rl_train.data.images import ImageReader, image_settings
from rl_train.data.processors import load_policy_tokenizer
from rl_train.workbench.dataset_view import view_datasets
from rlcore_cli.starter.data_file import read_data_file, recognize


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
def test_a_teacher_with_another_image_processor_is_refused(tmp_path, model, registry):
    other = tmp_path / "teacher"
    write_processor(other, "qwen2_5_vl")
    run = config_of(tmp_path, model, registry)
    teacher = run.policy.model_copy(update={"model_name": str(other)})
    taught = run.model_copy(update={"teacher": teacher})
    assert Preparation(taught, registry).loaders.batches.take(2)["images"]
    settings = other / "preprocessor_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"max_pixels": 32 * 32}))
    with pytest.raises(ConfigError, match="has other settings than that of the policy") as caught:
        _ = Preparation(taught, registry).loaders
    assert caught.value.key == "teacher.model_name"


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


@pytest.mark.usefixtures("able")
def test_rows_are_shown_with_the_size_and_tokens_of_their_images(tmp_path, model, registry):
    [view] = view_datasets(Preparation(config_of(tmp_path, model, registry), registry), measured=4, shown=1)
    [row] = view.samples
    picture = tmp_path / "square.png"
    assert f"<|vision_start|>[image: {picture}, 256 x 256 pixels, 64 tokens]<|vision_end|>What is it?<|im_end|>" in row.text
    assert row.tokens == view.lengths[0] > 64


def test_a_starter_config_recognizes_rows_with_images(tmp_path):
    Image.linear_gradient("L").save(tmp_path / "a.png")
    part = {"type": "image", "image": "a.png"}
    talk = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "a ramp"}]
    (tmp_path / "rows.json").write_text(json.dumps([{"messages": talk}, {"question": "b", "answer": "c", "image": "a.png"}]))
    data = read_data_file(tmp_path / "rows.json")
    assert data.rows[0]["messages"][0]["content"] == [part | {"image": str(tmp_path / "a.png")}]
    assert data.rows[1] == {"question": "b", "answer": "c", "image": str(tmp_path / "a.png")}
    for row, name in zip(data.rows, ("a conversation", "a question (question) and an answer (answer)"), strict=True):
        assert recognize([row], "rows.json").name == f"{name}, with images"
    assert "images" not in recognize([{"question": "b", "answer": "c", "image": None}], "rows.json").name


@pytest.mark.parametrize("field", ["path", "url", "image_url"])
def test_a_starter_config_changes_the_paths_of_images_and_no_other_texts(tmp_path, field):
    Image.linear_gradient("L").save(tmp_path / "a.png")
    part = {"type": "image_url", field: {"url": "a.png"}} if field == "image_url" else {"type": "image", field: "a.png"}
    row = {"messages": [{"role": "user", "content": [part]}], "path": "a.png", "url": "a.png"}
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    [read] = read_data_file(tmp_path / "rows.json").rows
    assert (read["path"], read["url"]) == ("a.png", "a.png")
    assert json.dumps(str(tmp_path / "a.png")) in json.dumps(read["messages"])


def test_the_template_and_the_settings_of_the_processor_are_used_and_carried_over(tmp_path):
    model, exported = tmp_path / "model", tmp_path / "exported"
    write_processor(model, "qwen2_5_vl")
    exported.mkdir()
    template = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    (model / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = load_policy_tokenizer(PolicyConfig(backend="hf", model_name=str(model), max_total_sequence_length=9))
    assert tokenizer.chat_template == template
    carry_over_tokenizer(tokenizer, exported)
    for name in ("preprocessor_config.json", "processor_config.json", "chat_template.json", "tokenizer.json"):
        assert (exported / name).read_bytes() == (model / name).read_bytes()


def test_settings_of_the_image_processor_are_those_of_the_config_also_in_checkpoints(tmp_path):
    model, exported = tmp_path / "model", tmp_path / "exported"
    write_processor(model, "qwen2_5_vl")
    exported.mkdir()
    tokenizer = load_policy_tokenizer(PolicyConfig(backend="hf", model_name=str(model), max_total_sequence_length=9))
    picture = [ImageSource(Image.new("RGB", (64, 64)))]
    counts = {}
    for name, kwargs in (("published", {}), ("smaller", {"max_pixels": 16 * 16})):
        tokenizer.image_reader = ImageReader(str(model), ImagesConfig(processor_kwargs=kwargs))
        [counts[name]] = [image.num_placeholders for image in tokenizer.image_reader.read(picture, tokenizer)]
    assert counts == {"published": 64, "smaller": 4}
    carry_over_tokenizer(tokenizer, exported)
    (exported / "config.json").write_bytes((model / "config.json").read_bytes())
    assert image_settings(str(exported), tokenizer) != image_settings(str(model), tokenizer)
    tokenizer.image_reader = ImageReader(str(exported), ImagesConfig())
    assert tokenizer.image_reader.read(picture, tokenizer)[0].num_placeholders == 4


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"max_pixel": 256}, "has no setting 'max_pixel'. Did you mean 'max_pixels'?"),
        ({"return_tensors": "np"}, "has no setting 'return_tensors'"),
        ({"max_pixels": "many"}, "cannot use {'max_pixels': 'many'}"),
    ],
)
def test_a_setting_that_the_image_processor_does_not_have_is_an_error_with_its_key(kwargs, says, tmp_path):
    write_processor(tmp_path, "qwen2_5_vl")
    tokenizer = load_policy_tokenizer(PolicyConfig(backend="hf", model_name=str(tmp_path), max_total_sequence_length=9))
    reader = ImageReader(str(tmp_path), ImagesConfig(processor_kwargs=kwargs))
    with pytest.raises(ConfigError, match=re.escape(says)) as refused:
        reader.read([ImageSource(Image.new("RGB", (64, 64)))], tokenizer)
    assert refused.value.key == "data.images.processor_kwargs"
