"""Rollouts of prompts with images: what engines, environments, logs and checkpoints get, and the rows that are trained."""

import base64
import copy
import io
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_processors import write_processor

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.tokenizer import decode, load_tokenizer
from rl_core.errors import ConfigError, DataError
from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn, GenerationInterface
from rl_train.config.data_sections import ImagesConfig
from rl_train.data.images import ImageReader, num_bytes
from rl_train.data.processors import conversation_datum, preference_datum, prompt_datum
from rl_train.data.row_sections import OnTooLong
from rl_train.rollouts.batches import PreferenceBatches, TrainingBatches
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.records import SavedGroup, load_groups, recorded_rollout, rollout_records, save_groups
from rl_train.rollouts.source import start_rollouts
from rl_train.rollouts.trajectory import SampleStream, join_segments, split_segments, to_batch


class Engine(GenerationInterface):
    """Answers every prompt with the same tokens, and keeps the rows that it was sent."""

    def __init__(self, answer):
        self.answer, self.rows = answer, []

    def generate(self, data, greedy=False):
        self.rows.append(data)
        lengths = data["input_lengths"].tolist()
        rows = [torch.tensor([*ids[:n].tolist(), *self.answer]) for ids, n in zip(data["input_ids"], lengths, strict=True)]
        logprobs = [torch.tensor([0.0] * n + [-1.0] * len(self.answer)) for n in lengths]
        pad = torch.nn.utils.rnn.pad_sequence
        return BatchedDataDict(
            {
                "output_ids": pad(rows, batch_first=True),
                "logprobs": pad(logprobs, batch_first=True),
                "generation_lengths": torch.full((len(rows),), len(self.answer)),
                "unpadded_sequence_lengths": torch.tensor([len(row) for row in rows]),
                "truncated": torch.zeros(len(rows), dtype=torch.bool),
                "weight_version": torch.zeros(len(rows), dtype=torch.int64),
            }
        )

    def prepare_for_generation(self, *args, **kwargs):
        return True

    def finish_generation(self, *args, **kwargs):
        return True

    def shutdown(self):
        return True


class Turns(EnvironmentInterface):
    """Ends after two turns; keeps the conversations."""

    def __init__(self):
        self.logs = []

    def step(self, message_log_batch, metadata):
        self.logs += message_log_batch
        n = len(metadata)
        return EnvironmentReturn(
            observations=[{"role": "user", "content": "again"}] * n,
            metadata=[{"turn": each["turn"] + 1} for each in metadata],
            next_stop_strings=[None] * n,
            rewards=torch.ones(n),
            terminateds=torch.tensor([float(each["turn"] == 1) for each in metadata]),
        )


@pytest.fixture(scope="module", params=["idefics3", "qwen2_5_vl"])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write_processor(folder, request.param)
    tokenizer = load_tokenizer(folder)
    tokenizer.image_reader = ImageReader(str(folder), ImagesConfig())
    return tokenizer


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    paths = [folder / f"{name}.png" for name in ("wide", "square")]
    for path, size in zip(paths, ((90, 30), (50, 50)), strict=True):
        Image.effect_noise(size, 60).convert("RGB").save(path)
    return paths


def asked(*pictures: Path, question: str = "What is it?") -> dict:
    images = [{"type": "image", "path": str(path)} for path in pictures]
    return {"role": "user", "content": [*images, {"type": "text", "text": question}] if images else question}


def prompt(tokenizer, *messages, idx=0, **limits):
    record = {"messages": list(messages), "extra_env_info": {"turn": 0}, "task_name": "turns"}
    return prompt_datum(record, idx=idx, tokenizer=tokenizer, **limits)


def end(tokenizer) -> list[int]:
    return [*tokenizer("red", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def played(tokenizer, *prompts, history="as_sampled", samples=2, environment=None):
    engine, environment = Engine(end(tokenizer)), environment or Turns()
    rows = start_rollouts(prompts, samples)
    Collector(
        generation=engine,
        environments={"turns": environment},
        tokenizer=tokenizer,
        seed=7,
        max_turns={"turns": 2},
        max_total_length=2000,
        history=history,
    ).collect(rows, stream=SampleStream.TRAINING)
    return rows, engine, environment


def check_places(batch, row: int) -> None:
    """Every image of a row covers its placeholders, and no other token is one."""
    tokens = batch["input_ids"][row, : batch["input_lengths"][row]].clone()
    for image in batch["images"][row]:
        assert int((tokens[image.start : image.end] == image.placeholder_id).sum()) == image.num_placeholders
        tokens[image.start : image.end] = -1
    assert not (tokens == batch["images"][row][0].placeholder_id).any()


def test_engine_and_policy_get_the_images_of_each_turn_and_samples_share_their_pixels(tokenizer, pictures):
    both, none = prompt(tokenizer, asked(*pictures)), prompt(tokenizer, asked(), idx=1)
    rows, engine, _ = played(tokenizer, both, none)
    for sent in engine.rows:
        assert [images and len(images) for images in sent["images"]] == [2, 2, None, None]
        check_places(sent, 0)
    batch = to_batch(rows)
    assert [images and len(images) for images in batch["images"]] == [2, 2, None, None]
    for row in (0, 1):
        check_places(batch, row)
    prompt_inputs = [image.inputs for message in both["message_log"] for image in message.get("images", ())]
    repeated = [
        batch,
        batch.repeat_interleave(2),
        batch.select_indices([1, 0]),
        *batch.shard_by_batch_size(2),
        copy.deepcopy(batch),
    ]
    for each in (*engine.rows, *repeated):
        for images in filter(None, each["images"]):
            assert [image.inputs for image in images] == prompt_inputs
            assert all(image.inputs is same for image, same in zip(images, prompt_inputs, strict=True))


def test_a_batch_that_is_sent_has_the_pixels_of_a_picture_once(tokenizer, pictures):
    rows, _, _ = played(tokenizer, prompt(tokenizer, asked(pictures[0])), samples=8)
    images = to_batch(rows)["images"]
    sent = pickle.dumps(BatchedDataDict({"images": images}), protocol=5)
    assert len(sent) < 2 * num_bytes(images[0][0])
    arrived = pickle.loads(sent)["images"]
    assert arrived[0][0].inputs is arrived[7][0].inputs
    assert arrived[0][0].inputs.digest() == arrived[0][0].digest == images[0][0].digest


def test_batches_without_images_have_no_such_column(tokenizer):
    rows, engine, _ = played(tokenizer, prompt(tokenizer, asked()))
    assert "images" not in to_batch(rows)
    assert all("images" not in sent for sent in engine.rows)


def test_environments_and_logs_refer_to_images_without_their_pixels(tokenizer, pictures):
    [row, *_], _, environment = played(tokenizer, prompt(tokenizer, asked(pictures[0])))
    digest = row.message_log[0]["images"][0].digest
    reference = {"type": "image", "path": str(pictures[0]), "digest": digest, "width": 90, "height": 30}
    for log in environment.logs:
        assert log[0] == {"role": "user", "content": [reference, {"type": "text", "text": "What is it?"}]}
    [record] = rollout_records([row])
    assert json.loads(json.dumps(record)) == record
    assert record["prompt"] == "[image]What is it?"
    assert record["messages"][0]["content"][0] == reference
    [[image]] = record["images"]
    assert image["digest"] == digest
    with pytest.raises(DataError, match="cannot be replayed"):
        recorded_rollout(record, {})


def test_thumbnails_of_pictures_without_a_file_are_recorded_once_in_a_step(tokenizer, pictures):
    inline = f"data:image/png;base64,{base64.b64encode(pictures[0].read_bytes()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": inline}}, {"type": "image", "path": str(pictures[1])}]
    fresh = copy.copy(tokenizer)
    fresh.image_reader = ImageReader(tokenizer.image_reader.model, ImagesConfig())
    rows, _, _ = played(fresh, prompt(fresh, {"role": "user", "content": content}))
    first, second = rollout_records(rows)
    digest = first["images"][0][0]["digest"]
    assert [*first["thumbnails"]] == [digest]
    assert "thumbnails" not in second
    small = Image.open(io.BytesIO(base64.b64decode(first["thumbnails"][digest].removeprefix("data:image/jpeg;base64,"))))
    assert small.size == (90, 30)  # a picture is not enlarged
    original = np.asarray(Image.open(pictures[0]), dtype=float)
    assert abs(np.asarray(small, dtype=float).mean() - original.mean()) < 8
    assert all(
        isinstance(message["content"], str) or "thumbnail" not in str(message["content"]) for message in rows[0].message_log
    )


def test_groups_of_a_checkpoint_have_the_tensors_of_each_image_once(tokenizer, pictures, tmp_path):
    rows, _, _ = played(tokenizer, prompt(tokenizer, asked(*pictures)))
    save_groups(tmp_path, [SavedGroup(ordinal=0, began=0, accepted=True, rows=rows)], {})
    size = sum(map(num_bytes, rows[0].images()))
    assert (tmp_path / "images.safetensors").stat().st_size < size + 4096
    [group] = load_groups(tmp_path, {})
    before, after = to_batch(rows), to_batch(group.rows)
    assert torch.equal(before["input_ids"], after["input_ids"])
    for one, other in zip(before["images"], after["images"], strict=True):
        assert [repr(image) for image in one] == [repr(image) for image in other]
        assert [image.inputs.digest() for image in other] == [image.digest for image in one]


FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and not loop.last %}...{% else %}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{{ p['text'] if p['type'] == 'text' else MARK }}{% endfor %}{% endif %}{% endif %}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_each_segment_of_a_rewritten_history_has_its_images_at_their_places(tokenizer, pictures):
    other = copy.deepcopy(tokenizer)
    mark = next(name for name in ("<image>", "<|image_pad|>") if name in other.get_added_vocab())
    other.chat_template = FORGETFUL.replace("MARK", f"'{mark}'")
    [row, _], _, _ = played(other, prompt(other, asked(pictures[1])), history="template")
    assert len(row.segments) == 2
    batch = to_batch([row])
    for number in (0, 1):
        assert len(batch["images"][number]) == 1
        check_places(batch, number)
    assert batch["prompt_id"][0] == batch["prompt_id"][1]
    batch["images"][1] = None  # the images of a segment are its own
    assert split_segments(join_segments(batch))["images"] == batch["images"]


class Opening(Turns):
    """Adds a message to each prompt."""

    def reset(self, metadata):
        return {"role": "user", "content": "Look closely."}

    def close(self, session):
        return None


def test_a_prompt_that_an_environment_adds_to_keeps_its_images(tokenizer, pictures):
    rows, engine, _ = played(tokenizer, prompt(tokenizer, asked(*pictures)), environment=Opening())
    assert "Look closely." in decode(tokenizer, engine.rows[0]["input_ids"][0].tolist())
    assert [len(images) for images in to_batch(rows)["images"]] == [2, 2]
    for sent in (*engine.rows, to_batch(rows)):
        check_places(sent, 0)


def test_text_of_a_placeholder_stays_text(tokenizer, pictures):
    names = [name for name in ("<image>", "<|image_pad|>") if name in tokenizer.get_added_vocab()]
    question = f"Is {names[0]} a picture?"
    for files, count in (((), 0), (pictures[:1], 1)):
        datum = prompt(tokenizer, asked(*files, question=question))
        tokens = torch.cat([message["token_ids"] for message in datum["message_log"]])
        images = [image for message in datum["message_log"] for image in message.get("images", ())]
        placeholder = tokenizer.convert_tokens_to_ids(names[0])
        assert len(images) == count
        assert int((tokens == placeholder).sum()) == sum(image.num_placeholders for image in images)
        assert question in decode(tokenizer, tokens.tolist())
        clean = prompt(tokenizer, asked(*files, question="Is it a picture?"))
        first = [image for message in clean["message_log"] for image in message.get("images", ())]
        assert [(image.start, image.digest) for image in images] == [(image.start, image.digest) for image in first]


def test_a_prompt_that_is_too_long_is_not_cut_within_an_image(tokenizer, pictures):
    whole = prompt(tokenizer, asked(*pictures))
    first, second = (image for message in whole["message_log"] for image in message["images"])
    for limit in range(1, whole["length"]):
        datum = prompt(tokenizer, asked(*pictures), max_length=limit, on_too_long=OnTooLong.DROP)
        assert datum["loss_multiplier"] == 0.0
        images = [image for message in datum["message_log"] for image in message.get("images", ())]
        expected = limit
        for image in (second, first):
            if image.start <= limit < image.end:
                expected = image.start
        assert datum["length"] == expected
        assert len(images) == sum(image.end <= limit for image in (first, second))
    with pytest.raises(DataError, match=f"has {whole['length']} tokens, but 9 are allowed"):
        prompt(tokenizer, asked(*pictures), max_length=9, on_too_long=OnTooLong.ERROR)


def test_a_supervised_row_that_is_too_long_has_no_image_without_its_tokens(tokenizer, pictures):
    record = {"messages": [asked(*pictures), {"role": "assistant", "content": "red"}]}
    whole = conversation_datum(record, idx=0, tokenizer=tokenizer)
    placeholder = whole["message_log"][0]["images"][0].placeholder_id
    for limit in range(1, whole["length"]):
        datum = conversation_datum(record, idx=0, tokenizer=tokenizer, max_length=limit, on_too_long=OnTooLong.DROP)
        assert datum["loss_multiplier"] == 0.0
        tokens = torch.cat([message["token_ids"] for message in datum["message_log"]])
        images = [image for message in datum["message_log"] for image in message.get("images", ())]
        assert len(tokens) == datum["length"] <= limit
        assert sum(image.num_placeholders for image in images) == int((tokens == placeholder).sum())


class Loader:
    """Rows instead of a data loader."""

    def __init__(self, rows):
        self.rows = rows

    def forever(self):
        return iter(())

    def __iter__(self):
        return iter([self.rows])


def test_supervised_rows_and_pairs_have_the_column_of_images(tokenizer, pictures):
    texts, red = asked(), {"role": "assistant", "content": "red"}
    rows = [
        conversation_datum({"messages": [asked(*files), red]}, idx=number, tokenizer=tokenizer)
        for number, files in enumerate(((pictures[0],), (), pictures))
    ]
    [batch] = TrainingBatches(Loader(rows), pad_token_id=0).epoch()
    assert [images and len(images) for images in batch["images"]] == [1, None, 2]
    for row in (0, 2):
        check_places(batch, row)
    pair = {"prompt": [asked(pictures[1])], "chosen": [red], "rejected": [{"role": "assistant", "content": "blue"}]}
    [pairs] = PreferenceBatches(Loader([preference_datum(pair, idx=0, tokenizer=tokenizer)]), pad_token_id=0).epoch()
    assert pairs["images"][0][0].inputs is pairs["images"][1][0].inputs
    text_only = conversation_datum({"messages": [texts, red]}, idx=0, tokenizer=tokenizer)
    [without] = TrainingBatches(Loader([text_only]), pad_token_id=0).epoch()
    assert "images" not in without


def test_an_engine_that_reads_messages_is_refused(tokenizer, pictures):
    class Messages(Engine):
        reads_messages = True

    collector = Collector(
        generation=Messages([1]), environments={}, tokenizer=tokenizer, seed=0, max_turns={}, max_total_length=2000
    )
    with pytest.raises(ConfigError, match="A prompt has an image"):
        collector.collect(start_rollouts([prompt(tokenizer, asked(pictures[0]))], 1), stream=SampleStream.TRAINING)
