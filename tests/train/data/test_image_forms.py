"""The forms in which rows have images, and pictures that are refused or converted."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_processors import write_processor

from rl_core.data.tokenizer import load_tokenizer
from rl_core.errors import ConfigError, DataError
from rl_train.config.data_sections import ImagesConfig
from rl_train.data.dataset_config import (
    HuggingFaceDatasetConfig,
    JsonlDatasetConfig,
    ParquetDatasetConfig,
    PreferenceDatasetConfig,
)
from rl_train.data.datasets import RecordDataset
from rl_train.data.holdout import prompt_digest
from rl_train.data.image_sources import ImageSource
from rl_train.data.images import ImageReader, decoded
from rl_train.data.preferences import PreferenceDataset
from rl_train.data.processors import conversation_datum, preference_datum, prompt_datum

RED, BLUE = (200, 30, 30), (30, 30, 200)


def png(color=RED, size=(40, 24)) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", size, color).save(content, format="PNG")
    return content.getvalue()


def data_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    write_processor(folder, "qwen2_5_vl")
    return folder


@pytest.fixture(scope="module")
def tokenizer(model):
    tokenizer = load_tokenizer(model)
    tokenizer.image_reader = ImageReader(str(model), ImagesConfig())
    return tokenizer


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "red.png").write_bytes(png())
    (tmp_path / "pictures" / "blue.png").write_bytes(png(BLUE))
    return tmp_path


def lines(folder: Path, *rows) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def messages(*parts) -> list[dict]:
    return [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": "red"}]


ASKED = {"type": "text", "text": "Which color?"}
PARTS = {
    "OpenAI": {"type": "image_url", "image_url": {"url": data_url(png())}},
    "OpenAI without an object": {"type": "image_url", "image_url": data_url(png())},
    "OpenAI responses": {"type": "input_image", "image_url": data_url(png())},
    "a relative path": {"type": "image", "path": "pictures/red.png"},
    "the key image": {"type": "image", "image": "pictures/red.png"},
    "the key url": {"type": "image", "url": data_url(png())},
    "base64": {"type": "image", "base64": base64.b64encode(png()).decode()},
    "bytes and path": {"type": "image", "image": {"bytes": None, "path": "pictures/red.png"}},
}


def images_of(datum, log: str = "message_log") -> list:
    return [image for message in datum[log] for image in message.get("images", ())]


@pytest.fixture(scope="module")
def reds(tokenizer) -> str:
    """The digest of the red picture."""
    return tokenizer.image_reader.read([ImageSource(png())], tokenizer)[0].digest


@pytest.mark.parametrize("form", PARTS)
def test_a_part_with_an_image_has_any_of_the_forms_of_openai_and_transformers(form, folder, tokenizer, reds):
    path = lines(folder, {"messages": messages(PARTS[form], ASKED)})
    [record] = RecordDataset(JsonlDatasetConfig(path=path, input_key="messages", output_key=None))
    datum = conversation_datum(record, idx=0, tokenizer=tokenizer)
    assert [image.digest for image in images_of(datum)] == [reds]
    [part, asked] = datum["message_log"][0]["content"]
    assert asked == ASKED
    assert part["type"] == "image"
    assert part["digest"] == reds
    assert ("path" in part) == ("path" in form or form == "the key image")
    json.dumps(part)


COLUMNS = {
    "a text": ({"question": "Which color?"}, {"input_key": "question"}),
    "messages": ({"prompt": [{"role": "user", "content": "Which color?"}]}, {"input_key": "prompt"}),
    "a system message": (
        {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which color?"}]},
        {"input_key": "prompt"},
    ),
    "a part without an image": ({"prompt": messages({"type": "image"}, ASKED)[:1]}, {"input_key": "prompt"}),
}


@pytest.mark.parametrize("column", ["image", "images"])
@pytest.mark.parametrize("form", COLUMNS)
def test_the_images_of_a_column_are_placed_as_by_trl(form, column, folder, tokenizer, reds):
    row, keys = COLUMNS[form]
    image = "pictures/red.png" if column == "image" else ["pictures/red.png"]
    [record] = RecordDataset(JsonlDatasetConfig(path=lines(folder, {**row, column: image}), output_key=None, **keys))
    datum = prompt_datum(record, idx=0, tokenizer=tokenizer)
    assert [image.digest for image in images_of(datum)] == [reds]
    asked = next(message for message in record["messages"] if message["role"] == "user")
    assert [part["type"] for part in asked["content"]] == ["image", "text"]


def test_images_of_a_column_fill_the_parts_in_their_order(folder, tokenizer):
    given = [
        {"role": "user", "content": [{"type": "image"}, ASKED]},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "image"}]},
    ]
    path = lines(folder, {"prompt": given, "shots": ["pictures/blue.png", "pictures/red.png"]})
    [record] = RecordDataset(JsonlDatasetConfig(path=path, input_key="prompt", output_key=None, images_key="shots"))
    sources = [
        part["image"].value
        for message in record["messages"]
        for part in message["content"]
        if isinstance(part, dict) and part["type"] == "image"
    ]
    assert sources == ["pictures/blue.png", "pictures/red.png"]


def test_images_of_a_column_are_left_out_on_request(folder):
    path = lines(folder, {"question": "Which color?", "images": ["pictures/red.png"]})
    [record] = RecordDataset(JsonlDatasetConfig(path=path, output_key=None, images_key=None))
    assert record["messages"] == [{"role": "user", "content": "Which color?"}]


LEFT_OUT = {
    "sharegpt": {
        "image": "pictures/red.png",
        "conversations": [{"from": "human", "value": "Which color?"}, {"from": "gpt", "value": "red"}],
    },
    "record": {"images": ["pictures/red.png"], "messages": messages(ASKED)},
}


@pytest.mark.parametrize("function", LEFT_OUT)
def test_record_functions_get_rows_without_the_images_that_are_left_out(function, folder):
    path = lines(folder, LEFT_OUT[function])
    [record] = RecordDataset(JsonlDatasetConfig(path=path, record_fn=function, images_key=None))
    assert record["messages"][0] == {"role": "user", "content": "Which color?"}


def red_or_blue(folder: Path, color, row, **keys) -> RecordDataset:
    """A row about a picture that has the same name in every folder."""
    (folder / "pictures").mkdir(parents=True)
    (folder / "pictures" / "1.png").write_bytes(png(color, size=(40, 24 if color == RED else 99)))
    return RecordDataset(JsonlDatasetConfig(path=lines(folder, row), output_key=None, **keys))


SHOWN = {
    "a column": {"question": "Which color?", "images": ["pictures/1.png"]},
    "a part": {"question": [{"role": "user", "content": [{"type": "image", "path": "pictures/1.png"}, ASKED]}]},
}


@pytest.mark.parametrize("form", SHOWN)
def test_prompts_with_other_pictures_of_the_same_name_are_other_prompts(form, tmp_path):
    train, same, other = (
        red_or_blue(tmp_path / name, color, SHOWN[form]) for name, color in (("train", RED), ("same", RED), ("other", BLUE))
    )
    assert prompt_digest(train, 0) == prompt_digest(same, 0)
    assert prompt_digest(train, 0) != prompt_digest(other, 0)


@pytest.mark.parametrize("form", SHOWN)
def test_a_system_prompt_does_not_change_which_prompt_a_row_with_images_is(form, tmp_path):
    plain = red_or_blue(tmp_path / "plain", RED, SHOWN[form])
    instructed = red_or_blue(tmp_path / "instructed", RED, SHOWN[form], system_prompt="Be brief.")
    assert prompt_digest(plain, 0) == prompt_digest(instructed, 0)


OF_PYTHON = {
    "an unknown part": (messages({"type": "note", "note": "a"}), "part of type 'note'"),
    "an image of the assistant": (
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": [PARTS["base64"]]}],
        "has an image and the role 'assistant'",
    ),
}


@pytest.mark.parametrize("form", OF_PYTHON)
def test_records_of_a_dataset_in_python_may_have_the_same_parts_as_those_of_files(form, tokenizer):
    record, says = OF_PYTHON[form]
    with pytest.raises(DataError, match=says):
        conversation_datum({"messages": [*record, {"role": "assistant", "content": "red"}]}, idx=0, tokenizer=tokenizer)


def test_both_answers_of_a_pair_have_the_images_of_the_prompt(folder, tokenizer, reds):
    path = lines(folder, {"prompt": "Which color?", "chosen": "red", "rejected": "blue", "images": ["pictures/red.png"]})
    [record] = PreferenceDataset(PreferenceDatasetConfig(path=path))
    datum = preference_datum(record, idx=0, tokenizer=tokenizer)
    for side in ("message_log_chosen", "message_log_rejected"):
        assert [image.digest for image in images_of(datum, side)] == [reds]


def test_the_marks_of_llava_rows_are_the_places_of_images(folder, tokenizer):
    turns = [{"from": "human", "value": "<image>\nWhich color? And <image>?"}, {"from": "gpt", "value": "red"}]
    path = lines(folder, {"image": ["pictures/red.png", "pictures/blue.png"], "conversations": turns})
    [record] = RecordDataset(JsonlDatasetConfig(path=path, record_fn="sharegpt"))
    content = record["messages"][0]["content"]
    assert [part["image"].value if part["type"] == "image" else part["text"] for part in content] == [
        "pictures/red.png",
        "\nWhich color? And ",
        "pictures/blue.png",
        "?",
    ]
    assert len(images_of(conversation_datum(record, idx=0, tokenizer=tokenizer))) == 2
    with_text = lines(folder, {"conversations": turns})
    [record] = RecordDataset(JsonlDatasetConfig(path=with_text, record_fn="sharegpt"))
    assert record["messages"][0]["content"] == turns[0]["value"]


def rows_with_features(kind: str):
    import datasets

    image = datasets.Image()
    features = {"question": datasets.Value("string"), "images": datasets.List(image), "image": image}
    value = {"images": [Image.open(io.BytesIO(png()))], "image": Image.open(io.BytesIO(png()))}[kind]
    rows = {"question": ["Which color?"], kind: [value]}
    return datasets.Dataset.from_dict(rows, features=datasets.Features({key: features[key] for key in rows}))


@pytest.mark.parametrize("saved", ["parquet", "huggingface"])
@pytest.mark.parametrize("column", ["image", "images"])
def test_image_columns_of_hugging_face_datasets_are_read(column, saved, tmp_path, tokenizer, reds):
    table = rows_with_features(column)
    if saved == "parquet":
        table.to_parquet(tmp_path / "rows.parquet")
        config = ParquetDatasetConfig(path=tmp_path / "rows.parquet", output_key=None)
    else:
        table.save_to_disk(tmp_path / "saved")
        config = HuggingFaceDatasetConfig(path=str(tmp_path / "saved"), output_key=None)
    [record] = RecordDataset(config)
    assert [image.digest for image in images_of(prompt_datum(record, idx=0, tokenizer=tokenizer))] == [reds]


def test_pil_images_of_rows_in_python_are_read(tokenizer, reds):
    row = {"messages": messages({"type": "image", "image": Image.open(io.BytesIO(png()))}, ASKED)}
    datum = conversation_datum(row, idx=0, tokenizer=tokenizer)
    assert [image.digest for image in images_of(datum)] == [reds]


BAD_ROWS = {
    "a url of the network": ({"question": "a", "images": ["https://example.com/a.png"]}, "images are not downloaded"),
    "a number": ({"question": "a", "images": [3]}, "image 0 of the field 'images' is 3: expected a path"),
    "too few images": (
        {"question": [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}], "images": ["pictures/red.png"]},
        "2 parts of type 'image' without an image, but the field 'images' has 1 images",
    ),
    "no image": ({"question": [{"role": "user", "content": [{"type": "image"}]}]}, "no field with images"),
    "no user": ({"question": [{"role": "system", "content": "a"}], "images": ["a.png"]}, "no message has the role 'user'"),
    "marks for more images than there are": (
        {
            "conversations": [
                {"from": "human", "value": "<image>What is it?"},
                {"from": "gpt", "value": "a square"},
                {"from": "human", "value": "<image>Which color?"},
                {"from": "gpt", "value": "red"},
            ],
            "images": ["pictures/red.png"],
        },
        "2 parts of type 'image' without an image, but the field 'images' has 1 images",
    ),
    "a video": ({"question": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]}, "part of type 'video'"),
    "audio": ({"question": [{"role": "user", "content": [{"type": "audio_url", "url": "a"}]}]}, "part of type 'audio_url'"),
    "an image of the assistant": (
        {"question": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [PARTS["base64"]]}]},
        "has an image and the role 'assistant'",
    ),
}


@pytest.mark.parametrize("form", BAD_ROWS)
def test_rows_whose_images_cannot_be_placed_are_bad_rows(form, folder):
    row, says = BAD_ROWS[form]
    keys = {"record_fn": "sharegpt"} if "conversations" in row else {"output_key": None}
    with pytest.raises(DataError) as caught:
        RecordDataset(JsonlDatasetConfig(path=lines(folder, row), **keys))
    assert says in str(caught.value)
    assert "rows.jsonl:1" in str(caught.value)


def read(content: bytes, tokenizer, **limits):
    reader = ImageReader(tokenizer.image_reader.model, ImagesConfig(**limits))
    return reader.read([ImageSource(content)], tokenizer)[0]


def saved(picture: Image.Image, kind: str, **options) -> bytes:
    content = io.BytesIO()
    picture.save(content, format=kind, **options)
    return content.getvalue()


def animated() -> bytes:
    frames = [Image.new("RGB", (16, 16), (shade, 0, 0)) for shade in (0, 90, 180)]
    return saved(frames[0], "GIF", save_all=True, append_images=frames[1:])


BAD_PICTURES = {
    "no image": (b"<html>not found</html>", "not an image of a supported format"),
    "an empty file": (b"", "not an image of a supported format"),
    "truncated": (saved(Image.effect_noise((64, 64), 50), "PNG")[:-900], "corrupt or truncated"),
    "a truncated JPEG": (saved(Image.effect_noise((64, 64), 50), "JPEG")[:600], "corrupt or truncated"),
    "animated": (animated(), "animated or has several pages (3)"),
    "32 bits": (saved(Image.fromarray(np.full((16, 16), 1e6, np.float32)), "TIFF"), "32 bits"),
    "an SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "not an image of a supported format"),
}


@pytest.mark.parametrize("form", BAD_PICTURES)
def test_pictures_that_cannot_be_used_are_refused_with_a_reason(form, tokenizer):
    content, says = BAD_PICTURES[form]
    with pytest.raises(DataError) as caught:
        read(content, tokenizer)
    assert says in str(caught.value)
    assert "image 0" in str(caught.value)


def test_pictures_over_the_limits_are_refused_before_they_are_decoded(tokenizer):
    large = saved(Image.new("L", (2000, 1000)), "PNG")
    with pytest.raises(DataError, match=r"2000 x 1000 pixels, but 1 million are allowed.*data.images.max_megapixels"):
        read(large, tokenizer, max_megapixels=1)
    assert read(large, tokenizer, max_megapixels=2).num_placeholders > 0
    noise = saved(Image.effect_noise((1200, 1200), 90), "PNG")
    assert len(noise) > 1 << 20
    with pytest.raises(DataError, match=r"MiB, but 1\.0 are allowed.*data.images.max_file_mib"):
        read(noise, tokenizer, max_file_mib=1)


def test_a_picture_that_claims_to_be_huge_is_refused_without_its_memory(tokenizer):
    claims = bytearray(saved(Image.new("L", (16, 16)), "BMP"))
    claims[18:26] = (60000).to_bytes(4, "little") * 2
    with pytest.raises(DataError, match=r"it is refused: .*3600000000 pixels"):
        read(bytes(claims), tokenizer)


def colors(content: bytes) -> np.ndarray:
    return np.asarray(decoded(content, ImagesConfig()))


def test_transparent_pixels_become_white():
    half = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    half.paste((10, 20, 30, 255), (0, 0, 2, 4))
    for picture in (half, half.convert("P"), half.convert("LA")):
        values = colors(saved(picture, "PNG"))
        assert (values[:, 3] == 255).all()
        assert (values[:, 0] < 40).all()


def test_pixels_of_16_bits_keep_their_brightness():
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)[None].repeat(4, 0)
    values = colors(saved(Image.fromarray(ramp), "PNG"))
    assert np.abs(values[0, :, 0].astype(int) - np.arange(256)).max() <= 1
    assert (values[..., 0] == values[..., 2]).all()


def test_cmyk_and_gray_pictures_become_rgb():
    cmyk = Image.merge("CMYK", [Image.new("L", (8, 8), shade) for shade in (0, 255, 255, 0)])
    red = colors(saved(cmyk, "JPEG", quality=100))
    assert red.shape == (8, 8, 3)
    assert red[..., 0].min() > 200
    assert red[..., 1:].max() < 60
    gray = colors(saved(Image.new("L", (8, 8), 99), "PNG"))
    assert (gray == 99).all()


def test_a_photo_is_turned_as_its_exif_orientation_says():
    photo = Image.new("RGB", (40, 20), BLUE)
    photo.paste(RED, (0, 0, 20, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: the left side of the file is the top
    values = colors(saved(photo, "PNG", exif=exif))
    assert values.shape == (40, 20, 3)
    assert tuple(values[0, 0]) == RED
    assert tuple(values[-1, 0]) == BLUE


def test_a_picture_is_processed_once_while_it_is_kept(tokenizer, monkeypatch):
    reader = ImageReader(tokenizer.image_reader.model, ImagesConfig())
    first, again = (reader.read([ImageSource(png())], tokenizer)[0] for _ in range(2))
    assert first is again
    other = reader.read([ImageSource(png(BLUE))], tokenizer)[0]
    assert other.digest != first.digest
    without_memory = ImageReader(tokenizer.image_reader.model, ImagesConfig(cache_mib=0))
    kept = [without_memory.read([ImageSource(png(color))], tokenizer)[0] for color in (RED, BLUE, RED)]
    assert kept[0] is not kept[2]
    assert kept[0].digest == kept[2].digest


def test_a_model_of_text_is_refused(tmp_path, tokenizer):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="is a model of text") as caught:
        ImageReader(str(tmp_path), ImagesConfig()).read([ImageSource(png())], tokenizer)
    assert caught.value.key == "policy.model_name"


def test_a_model_without_processor_files_is_refused(tmp_path, model, tokenizer):
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"needs its preprocessor_config.json"):
        ImageReader(str(tmp_path), ImagesConfig()).read([ImageSource(png())], tokenizer)
