"""Rows with images: their tokens are those of the model's own processor, and batches have the tensors of each image."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny_processors import FAMILIES, own_processor, write_processor

from rl_core.data.tokenizer import decode, load_tokenizer
from rl_core.errors import DataError
from rl_train.config.data_sections import ImagesConfig
from rl_train.data.images import ImageReader
from rl_train.data.messages import message_log_to_flat_messages
from rl_train.data.processors import conversation_datum, prompt_datum

SIZES = {"wide.png": (100, 30), "square.png": (50, 50), "tall.png": (20, 61), "tiny.png": (8, 8)}


def picture(width: int, height: int, seed: int) -> Image.Image:
    values = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(values.numpy())


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for seed, (name, (width, height)) in enumerate(SIZES.items()):
        picture(width, height, seed).save(folder / name)
    return folder


@pytest.fixture(scope="module", autouse=True)
def words_of_numbers():
    """SmolVLM's processor needs num2words, which only writes the number of frames of a video."""
    from transformers.models.smolvlm import processing_smolvlm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processing_smolvlm, "num2words", str)
        yield


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    write_processor(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def tokenizer(model):
    tokenizer = load_tokenizer(model)
    tokenizer.image_reader = ImageReader(str(model), ImagesConfig())
    return tokenizer


def text(value: str) -> dict:
    return {"type": "text", "text": value}


def user(*content) -> dict:
    return {"role": "user", "content": list(content)}


def answer(value: str) -> dict:
    return {"role": "assistant", "content": [text(value)]}


CONVERSATIONS = {
    "none": (user(text("What is 12?")), answer("a number")),
    "one": (user("square.png", text("What is it?")), answer("a square")),
    "several in a message": (user(text("Is\n"), "wide.png", text("\n\nlike "), "tall.png", text("?\n")), answer("no")),
    "several turns": (
        user("tiny.png", text("a?")),
        answer("red"),
        user("wide.png"),
        answer("blue"),
        user(text("b?")),
        answer("c"),
    ),
    "the same twice": (user("square.png", "square.png"), answer("same")),
}


def with_files(messages, folder: Path) -> list[dict]:
    return [
        {
            **message,
            "content": [
                {"type": "image", "path": str(folder / part)} if isinstance(part, str) else part for part in message["content"]
            ],
        }
        for message in messages
    ]


def own(model: Path, messages, **options) -> dict[str, torch.Tensor]:
    """What the model's own processor returns for a conversation."""
    loaded = [
        {
            **m,
            "content": [{"type": "image", "image": Image.open(p["path"])} if p["type"] == "image" else p for p in m["content"]],
        }
        for m in messages
    ]
    return own_processor(model).apply_chat_template(loaded, tokenize=True, return_dict=True, return_tensors="pt", **options)


def refuses(model: Path, name: str) -> bool:
    """Whether the family treats a picture differently next to others, so that rows with several are refused."""
    return "llava_onevision" in model.name and name not in ("none", "one")


def tokens_of(datum) -> torch.Tensor:
    return torch.cat([message["token_ids"] for message in datum["message_log"]])


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_tokens_and_tensors_of_a_row_are_those_of_the_own_processor(name, model, tokenizer, pictures):
    messages = with_files(CONVERSATIONS[name], pictures)
    if refuses(model, name):
        with pytest.raises(DataError, match="gives a picture other tokens next to others"):
            conversation_datum({"messages": messages}, idx=0, tokenizer=tokenizer)
        return
    datum = conversation_datum({"messages": messages}, idx=0, tokenizer=tokenizer)
    expected = own(model, messages)
    assert torch.equal(tokens_of(datum), expected["input_ids"][0])
    images = message_log_to_flat_messages(datum["message_log"]).get("images")
    count = sum(part["type"] == "image" for message in messages for part in message["content"])
    assert len(images or ()) == count
    covered = torch.zeros(datum["length"], dtype=torch.bool)
    for image in images or ():
        span = slice(image.start, image.end)
        assert not covered[span].any(), "images overlap"
        # White space at the ends may be one token with that of the text around the image.
        assert decode(tokenizer, tokens_of(datum)[span].tolist()).strip() == image.text.strip()
        assert int((tokens_of(datum)[span] == image.placeholder_id).sum()) == image.num_placeholders
        covered[span] = True
    if images:
        assert not (tokens_of(datum)[~covered] == images[0].placeholder_id).any()
        if "pixel_attention_mask" in expected:  # the tiles of all images of a row, padded to the most of any row
            start = 0
            for image in images:
                tiles = image.inputs["pixel_values"].shape[1]
                assert torch.equal(image.inputs["pixel_values"][0], expected["pixel_values"][0, start : start + tiles])
                start += tiles
        else:
            for key in expected.keys() & images[0].inputs.keys():
                assert torch.equal(torch.cat([image.inputs[key] for image in images]), expected[key])


@pytest.mark.parametrize("name", [name for name in CONVERSATIONS if name != "none"])
def test_a_prompt_has_the_tokens_of_the_own_processor_with_its_generation_prompt(name, model, tokenizer, pictures):
    if refuses(model, name):
        pytest.skip("refused, see above")
    messages = with_files(CONVERSATIONS[name], pictures)[:-1]
    datum = prompt_datum({"messages": messages}, idx=0, tokenizer=tokenizer)
    assert torch.equal(tokens_of(datum), own(model, messages, add_generation_prompt=True)["input_ids"][0])
