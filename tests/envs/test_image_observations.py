"""Environments whose observations are pictures: what the model reads, trains on and is logged."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))

import whole_vlms
from PIL import Image, ImageDraw
from tiny_processors import own_processor
from whole_vlms import part

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_backends_hf.config import HFPolicyConfig
from rl_core.data.tokenizer import load_tokenizer
from rl_core.errors import ConfigError, RLCoreError
from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_train.config.data_sections import ImagesConfig
from rl_train.data.images import ImageReader
from rl_train.data.processors import prompt_datum
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.records import rollout_records
from rl_train.rollouts.source import start_rollouts
from rl_train.rollouts.trajectory import SampleStream, to_batch


class Walk(EnvironmentInterface):
    """A dot walks over a board, which the model sees as a picture after each of its moves."""

    message = "Your move."

    def step(self, message_log_batch, metadata):
        n = len(metadata)
        places = [(row["place"] + 1) % 4 for row in metadata]
        observations = [{"role": "user", "content": [*self.picture(place), self.text()]} for place in places]
        ended = torch.tensor([float(place == 3) for place in places])
        return EnvironmentReturn(
            observations, [{"place": place} for place in places], [None] * n, torch.zeros(n), ended, [None] * n
        )

    def text(self):
        return {"type": "text", "text": self.message}

    def picture(self, place):
        return [part(board(place))]


def board(place):
    """A PNG file of the board."""
    picture = Image.new("RGB", (48, 16), "white")
    ImageDraw.Draw(picture).ellipse((16 * place, 2, 16 * place + 12, 14), fill="red")
    file = whole_vlms.io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module", params=whole_vlms.FAMILIES)
def folder(request, tmp_path_factory):
    return whole_vlms.write(tmp_path_factory.mktemp("vlm"), request.param)


@pytest.fixture(scope="module")
def tokenizer(folder):
    tokenizer = load_tokenizer(str(folder))
    tokenizer.image_reader = ImageReader(str(folder), ImagesConfig())
    return tokenizer


class EndsItsAnswers(HuggingFaceGeneration):
    """Answers that reach the limit count as complete, so that a model with random weights plays several turns."""

    async def generate_async(self, data, greedy=False):
        async for row, output in super().generate_async(data, greedy):
            output["truncated"] = torch.zeros_like(output["truncated"])
            yield row, output


def played(folder, tokenizer, environment, *, history="as_sampled", limit=300):
    question = {"role": "user", "content": [part(board(0)), {"type": "text", "text": "Walk."}]}
    datum = prompt_datum({"messages": [question], "task_name": "t", "extra_env_info": {"place": 0}}, idx=0, tokenizer=tokenizer)
    rows = start_rollouts([datum], 2)
    engine = EndsItsAnswers(str(folder), max_new_tokens=4, max_model_len=limit, torch_dtype="float32")
    collector = Collector(
        generation=engine,
        environments={"t": environment},
        tokenizer=tokenizer,
        seed=0,
        max_turns={"t": 5},
        max_total_length=limit,
        history=history,
    )
    try:
        collector.collect(rows, stream=SampleStream.TRAINING)
    finally:
        engine.shutdown()
    return rows


@pytest.mark.parametrize("history", ["as_sampled", "template"])
def test_policy_and_engine_read_the_pictures_of_an_environment(folder, tokenizer, history):
    rows = played(folder, tokenizer, Walk(), history=history)
    batch = to_batch(rows)
    images = own_processor(folder).image_processor
    for row in rows:
        assert row.failure is None, row.failure_details
        shown = row.images()
        assert len(shown) == 3
        tokens = row.token_ids()
        for place, image in enumerate(shown):
            picture = Image.open(whole_vlms.io.BytesIO(board(place)))
            torch.testing.assert_close(image.inputs["pixel_values"], images([[picture]], return_tensors="pt")["pixel_values"])
            span = tokens[image.start : image.end]
            assert int((span == image.placeholder_id).sum()) == image.num_placeholders
    config = HFPolicyConfig(model_name=str(folder), max_total_sequence_length=300)
    scores = HuggingFacePolicy(config=config).get_logprobs(batch)["logprobs"]
    torch.testing.assert_close(scores * batch["token_mask"], batch["generation_logprobs"], atol=1e-4, rtol=0)
    [record, _] = rollout_records(rows)
    contents = [message["content"] for message in record["messages"] if message["role"] == "user"]
    assert [[*each[0]] for each in contents] == [["type", "digest", "width", "height"]] * 3


@pytest.mark.parametrize("history", ["as_sampled", "template"])
def test_a_picture_that_does_not_fit_ends_the_rollout_and_is_in_no_row(folder, tokenizer, history):
    whole = played(folder, tokenizer, Walk(), history=history)[0].num_tokens()
    seen = set()
    for limit in (whole - 24, whole + 1):
        rows = played(folder, tokenizer, Walk(), history=history, limit=limit)
        batch = to_batch(rows)
        given = batch["token_mask"] == 0  # the model may sample the placeholder itself
        for ids, images in zip(batch["input_ids"].where(given, -1), batch["images"], strict=True):
            for image in images:
                assert int((ids[image.start : image.end] == image.placeholder_id).sum()) == image.num_placeholders
            assert sum(image.num_placeholders for image in images) == int((ids == images[0].placeholder_id).sum())
        assert int(batch["input_lengths"].max()) <= limit
        seen |= {(row.truncated, len(row.images())) for row in rows}
    assert {(True, 2), (False, 3)} <= seen


def test_images_that_cannot_be_read_are_errors_of_the_environment(folder, tokenizer):
    class Path(Walk):
        def picture(self, place):
            return [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]

    with pytest.raises(RLCoreError, match=r"has an image '/etc/passwd': expected its file as `data:image/png;base64"):
        played(folder, tokenizer, Path())


def test_a_run_whose_engine_reads_no_images_names_the_reason(folder, tokenizer, monkeypatch):
    def check():
        raise ConfigError("policy.generation cannot use images")

    reader = ImageReader(str(folder), ImagesConfig(), check)
    rows = played(folder, tokenizer, Walk())
    monkeypatch.setattr(tokenizer, "image_reader", reader)
    with pytest.raises(ConfigError, match="cannot use images"):
        played(folder, tokenizer, Walk())
    assert rows[0].turns == 3
