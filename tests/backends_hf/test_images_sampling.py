"""The Transformers engine samples rows with images: its log-probabilities are those of the policy and of the model alone."""

from __future__ import annotations

import asyncio

import pytest
import tiny_vlms
import torch
from policy_cases import NLL
from tiny_vlms import FAMILIES, PLACEHOLDER, batch, plain, plain_logprobs, row, words

from rl_backends_base.replica_rows import prompt_keys
from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_backends_hf.config import HFPolicyConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import NotSupportedError, WorkerError
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_sync.transports import ByReferenceTransport, SharedMemoryTransport

FIRST = ("idefics3", "qwen2_5_vl")
EACH = [family if family in FIRST else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
NEW_TOKENS = 12


def prompts_of(rows):
    """The columns that an engine reads, with different seeds."""
    columns = {key: rows[key] for key in ("input_ids", "input_lengths", "images")}
    return BatchedDataDict(columns, sample_seeds=torch.arange(rows.size))


def scored(output, rows):
    """The rows of an engine's output, with their images, for a policy."""
    return BatchedDataDict(
        input_ids=output["output_ids"], input_lengths=output["unpadded_sequence_lengths"], images=rows["images"]
    )


def sampled(output):
    """[B, T] bool, sampled tokens."""
    column, end = torch.arange(output["output_ids"].shape[1]), output["unpadded_sequence_lengths"].unsqueeze(1)
    return (column < end) & (column >= end - output["generation_lengths"].unsqueeze(1))


def check_logprobs(output, rows, model):
    """Compare the log-probabilities of sampled tokens with those of each row alone."""
    with torch.no_grad():
        expected = plain_logprobs(model, scored(output, rows))
    where = sampled(output)
    # Keys and values come from a cache, so sums have another order.
    torch.testing.assert_close(output["logprobs"][where], expected[where], rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def engines(vlm_folder):
    """The engine of a family."""
    made = {}

    def get(family):
        if family not in made:
            made[family] = HuggingFaceGeneration(vlm_folder(family), max_new_tokens=NEW_TOKENS)
        return made[family]

    yield get
    for engine in made.values():
        engine.shutdown()


@pytest.mark.parametrize("family", EACH)
def test_engine_logprobs_are_those_of_the_policy_and_of_each_row_alone(vlm_folder, engines, family):
    rows = tiny_vlms.samples(family)
    rows = BatchedDataDict.from_batches([prompts_of(each) for each in (rows, tiny_vlms.conversations(family), rows)])
    rows["sample_seeds"] = torch.arange(rows.size)
    output = engines(family).generate(rows)
    check_logprobs(output, rows, plain(vlm_folder(family)))
    section = {"max_total_sequence_length": 256, "generation": {"backend": "hf", "max_new_tokens": NEW_TOKENS}}
    policy = HuggingFacePolicy(config=HFPolicyConfig(model_name=vlm_folder(family), **section))
    scores, where = policy.get_logprobs(scored(output, rows))["logprobs"], sampled(output)
    assert float((scores - output["logprobs"])[where].abs().mean()) < 1e-5
    # A policy samples the same tokens with its own sampler.
    own = policy.generate(rows.slice(0, 4))
    torch.testing.assert_close(own["logprobs"][:, : own["output_ids"].shape[1]].sum(1), output["logprobs"][:4].sum(1))


@pytest.mark.parametrize("family", FIRST)
def test_equal_tokens_with_other_pictures_are_another_prompt(vlm_folder, engines, family):
    rows = batch([row(family, [words(1, 40), seed, words(2, 4)]) for seed in (0, 3, 0, 3)])
    assert torch.equal(rows["input_ids"][0], rows["input_ids"][1])
    keys = prompt_keys(rows)
    assert keys[0] == keys[2] != keys[1] == keys[3]
    rows = prompts_of(rows)
    output = engines(family).generate(rows, greedy=True)
    assert torch.equal(output["logprobs"][0], output["logprobs"][2])
    assert not torch.equal(output["logprobs"][0], output["logprobs"][1])
    check_logprobs(output, rows, plain(vlm_folder(family)))


async def turns_of(engine, family, session):
    """Three turns of one session: a picture in the first, text, and two pictures in the last. Yields output and its row."""
    parts = [[words(1, 5), 0, words(2, 3)], [words(3, 4)], [words(4, 2), 4, words(5, 2), 3, words(6, 3)]]
    tokens, images, turns = [], [], []
    for number, more in enumerate(parts):
        new, new_images = row(family, more)
        images = [*images, *(image.moved(len(tokens)) for image in new_images or ())]
        tokens += new
        rows = prompts_of(batch([(tokens, images)]))
        rows["sample_seeds"] = torch.tensor([number])
        rows["session_ids"] = [session]
        [(_, output)] = [each async for each in engine.generate_async(rows)]
        turns.append((output, rows))
        tokens = output["output_ids"][0, : output["unpadded_sequence_lengths"][0]].tolist()
    return turns


@pytest.mark.parametrize("family", EACH)
def test_a_session_continues_from_its_pictures_and_takes_new_ones(vlm_folder, engines, monkeypatch, family):
    engine, shown = engines(family), []
    base = engine.group.worker.model.base_model
    encode = base.get_image_features
    monkeypatch.setattr(base, "get_image_features", lambda **given: shown.append(given) or encode(**given))

    async def all_sessions():
        # A second session with other names of the same turns runs at the same time.
        return await asyncio.gather(*(turns_of(engine, family, f"{family}-{number}") for number in range(2)))

    sessions = asyncio.run(all_sessions())
    monkeypatch.undo()
    model = plain(vlm_folder(family))
    for turns in sessions:
        for output, rows in turns:
            check_logprobs(output, rows, model)
    if family == "qwen2_5_vl":  # each picture is encoded in its own turn only, once or for each of the sessions
        assert sum(len(each["image_grid_thw"]) for each in shown) in (3, 6)


@pytest.mark.parametrize("family", FIRST)
def test_pictures_of_a_session_are_compared_not_only_its_tokens(vlm_folder, engines, family):
    async def sample():
        outputs = []
        for seed in (0, 3):  # equal tokens, as if another conversation had taken the name
            rows = prompts_of(batch([row(family, [words(1, 5), seed, words(2, 3)])]))
            rows["session_ids"] = ["same"]
            outputs += [(output, rows) async for _, output in engines(family).generate_async(rows)]
        return outputs

    for output, rows in asyncio.run(sample()):
        check_logprobs(output, rows, plain(vlm_folder(family)))


@pytest.mark.parametrize("transport", [pytest.param(ByReferenceTransport, marks=pytest.mark.slow), SharedMemoryTransport])
@pytest.mark.parametrize("family", EACH)
def test_a_refit_sends_tower_and_projector(vlm_folder, tmp_path, family, transport):
    section = {"optimizer": {"kwargs": {"lr": 1e-2}}, "max_total_sequence_length": 256}
    policy = HuggingFacePolicy(config=HFPolicyConfig(model_name=vlm_folder(family), **section))
    engine = HuggingFaceGeneration(vlm_folder(family), max_new_tokens=NEW_TOKENS)
    sync = WeightSynchronizer(policy, engine, WeightSender(policy, transport, folder=tmp_path))
    rows = prompts_of(tiny_vlms.samples(family))
    try:
        policy.train(tiny_vlms.samples(family), NLL())
        sync.sync()
        output = engine.generate(rows)
        scores, where = policy.get_logprobs(scored(output, rows))["logprobs"], sampled(output)
        assert float((scores - output["logprobs"])[where].abs().mean()) < 1e-5
        digests = policy.weight_digests()
        assert digests == engine.weight_digests()
        tower = [name for name in digests if "vision" in name or "visual" in name]
        assert len(tower) > 20
    finally:
        sync.close()
        engine.shutdown()


def test_rows_in_progress_at_a_refit_keep_their_pictures(vlm_folder, tmp_path):
    family = "qwen2_5_vl"
    section = {"optimizer": {"kwargs": {"lr": 1e-2}}, "max_total_sequence_length": 256}
    policy = HuggingFacePolicy(config=HFPolicyConfig(model_name=vlm_folder(family), **section))
    engine = HuggingFaceGeneration(vlm_folder(family), max_new_tokens=NEW_TOKENS)
    sync = WeightSynchronizer(policy, engine, WeightSender(policy, SharedMemoryTransport, folder=tmp_path))
    rows, outputs = prompts_of(tiny_vlms.samples(family)), {}
    rows["max_new_tokens"] = torch.tensor([2, *[NEW_TOKENS] * (rows.size - 1)])
    policy.train(tiny_vlms.samples(family), NLL())
    sync.sync()
    policy.train(tiny_vlms.samples(family), NLL())

    async def collect():
        async for number, output in engine.generate_async(rows):
            if not outputs:
                sync.sync()
            outputs[number] = output

    try:
        asyncio.run(collect())
        last = outputs[rows.size - 1]
        assert last["token_versions"].unique().tolist() == [-1, 1, 2]
        scores = policy.get_logprobs(scored(last, rows.slice(rows.size - 1, rows.size)))["logprobs"]
        new = last["token_versions"] == 2
        torch.testing.assert_close(last["logprobs"][new], scores[new], rtol=0, atol=2e-5)
    finally:
        sync.close()
        engine.shutdown()


def test_adapters_reach_the_engine_unmerged(peft, vlm_folder, tmp_path):
    for family in FIRST:
        section = {"optimizer": {"kwargs": {"lr": 1e-2}}, "generation": {"backend": "hf", "lora": "adapter"}}
        lora = {"lora": {"rank": 2}}
        policy = HuggingFacePolicy(config=HFPolicyConfig(model_name=vlm_folder(family), hf_cfg=lora, **section))
        engine = HuggingFaceGeneration(vlm_folder(family), max_new_tokens=NEW_TOKENS, lora="adapter")
        sync = WeightSynchronizer(policy, engine, WeightSender(policy, SharedMemoryTransport, folder=tmp_path))
        try:
            policy.train(tiny_vlms.samples(family), NLL())
            sync.sync()
            rows = prompts_of(tiny_vlms.samples(family))
            output = engine.generate(rows)
            scores, where = policy.get_logprobs(scored(output, rows))["logprobs"], sampled(output)
            assert float((scores - output["logprobs"])[where].abs().mean()) < 1e-5
        finally:
            sync.close()
            engine.shutdown()


def test_an_engine_of_a_text_model_refuses_images(model_folder):
    engine = HuggingFaceGeneration(model_folder("llama"), max_new_tokens=2)
    rows = prompts_of(batch([row("idefics3", [words(1, 5)]), row("idefics3", [words(1, 5), 0])]))
    with pytest.raises(NotSupportedError, match=r"does not read images, but 1 of 2 rows have some \(the first is row 1\)"):
        engine.generate(rows)
    with pytest.raises(NotSupportedError, match="does not read images"):
        engine.generate_async(rows)


def test_sampled_placeholders_stay_tokens(vlm_folder, engines):
    rows = batch([row("qwen2_5_vl", [words(1, 5), 0, words(2, 3), [PLACEHOLDER] * 3])])
    rows = prompts_of(BatchedDataDict.from_batches([rows] * 3))
    rows["sample_seeds"] = torch.arange(3)
    check_logprobs(engines("qwen2_5_vl").generate(rows), rows, plain(vlm_folder("qwen2_5_vl")))
    rows["images"] = [[image.moved(3) for image in rows["images"][0]]] * 3
    with pytest.raises(WorkerError, match="4 placeholders"):
        engines("qwen2_5_vl").generate(rows)


def test_the_limit_of_an_engine_counts_every_token_of_every_image_once(vlm_folder):
    rows = prompts_of(batch([row("qwen2_5_vl", [words(1, 5), 0, words(2, 3), 4, words(3, 2)])]))
    length = int(rows["input_lengths"][0])
    for limit, tokens in ((length + 3, 3), (length + 1, 1)):
        engine = HuggingFaceGeneration(vlm_folder("qwen2_5_vl"), max_new_tokens=3, max_model_len=limit)
        try:
            output = engine.generate(rows)
        finally:
            engine.shutdown()
        assert output["generation_lengths"].tolist() == [tokens]
        assert output["unpadded_sequence_lengths"].tolist() == [length + tokens]
