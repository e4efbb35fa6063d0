"""Rows with images in vLLM: log-probabilities are those of plain Transformers, also after a refit of the tower."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen2VLConfig
from whole_vlms import tiny_processors, tiny_vlms

from rl_backends_hf import HuggingFacePolicy
from rl_backends_hf.config import HFPolicyConfig
from rl_backends_vllm import VllmConfig
from rl_backends_vllm.sources import IMAGE_FAMILIES, why_no_images
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DataError, WeightSyncError, WorkerError
from rl_train.algorithms.losses import NLLLossFn
from rl_train.weight_sync.canary import RefitCanary, make_canary
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_sync.transports import SharedMemoryTransport

pytestmark = pytest.mark.vllm

LENGTH, NEW = 256, 8
FIRST = "qwen2_5_vl"
EXAMPLES = Path(__file__).parents[2] / "examples"
EACH = [family if family == FIRST else pytest.param(family, marks=pytest.mark.slow) for family in IMAGE_FAMILIES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder of a tiny model by its family."""
    made = {}

    def get(family):
        if family not in made:
            made[family] = tiny_vlms.make(family, tmp_path_factory.mktemp(family), wide=True)
        return made[family]

    return get


@pytest.fixture
def vlms(engines, folder):
    """Engine of a family."""

    def get(family, **settings):
        settings = {"max_new_tokens": NEW, "max_model_len": LENGTH, "max_num_seqs": 16, "kv_cache_gib": 0.05, **settings}
        return engines(model_name=folder(family), **settings)

    return get


def prompts_of(rows, **columns):
    """The columns that an engine reads, with different seeds."""
    own = {key: rows[key] for key in ("input_ids", "input_lengths", "images")}
    return BatchedDataDict({**own, "sample_seeds": torch.arange(rows.size), **columns})


def sampled(output):
    """[B, T] bool, sampled tokens."""
    column, end = torch.arange(output["output_ids"].shape[1]), output["unpadded_sequence_lengths"].unsqueeze(1)
    return (column < end) & (column >= end - output["generation_lengths"].unsqueeze(1))


def expected(output, images, model):
    """[B, T] log-probabilities of each row alone, by the model's own forward pass."""
    columns = {"input_ids": output["output_ids"], "input_lengths": output["unpadded_sequence_lengths"], "images": images}
    with torch.no_grad():
        return tiny_vlms.plain_logprobs(model, BatchedDataDict(columns))


def check_logprobs(output, images, model):
    where = sampled(output)
    # Float32 sums in another order, in the tower as well.
    torch.testing.assert_close(output["logprobs"][where], expected(output, images, model)[where], rtol=0, atol=3e-5)


@pytest.mark.parametrize("family", EACH)
def test_log_probabilities_of_rows_with_images_are_those_of_each_row_alone(vlms, folder, family):
    # Rows without, with one and with two pictures of several sizes, and with placeholders that the model itself has sampled.
    rows = BatchedDataDict.from_batches(
        [prompts_of(each) for each in (tiny_vlms.samples(family), tiny_vlms.conversations(family))]
    )
    engine = vlms(family)
    assert engine.facts["images"]
    output = engine.generate(rows)
    check_logprobs(output, rows["images"], tiny_vlms.plain(folder(family)))
    policy = HuggingFacePolicy(config=HFPolicyConfig(model_name=folder(family), max_total_sequence_length=LENGTH))
    columns = {
        "input_ids": output["output_ids"],
        "input_lengths": output["unpadded_sequence_lengths"],
        "images": rows["images"],
    }
    scores = policy.get_logprobs(BatchedDataDict(columns))["logprobs"]
    assert float((scores - output["logprobs"])[sampled(output)].abs().mean()) < 1e-5


def pictured(seeds, words, **columns):
    """Prompts with equal tokens, of which the last `words` are text, that show different pictures; drawn with one seed."""
    rows = tiny_vlms.batch([tiny_vlms.row(FIRST, [[5], seed, tiny_vlms.words(2, words)]) for seed in seeds])
    assert len(rows["input_ids"].unique(dim=0)) == 1
    return prompts_of(rows, sample_seeds=torch.zeros(len(seeds), dtype=torch.int64), **columns)


def test_prompts_with_equal_tokens_and_other_pictures_are_sampled_differently(vlms):
    completions = vlms(FIRST).generate(pictured([0, 3, 0, 3], 1))["output_ids"][:, -NEW:].tolist()
    assert completions[0] == completions[2] != completions[1] == completions[3]


def test_prompts_with_equal_tokens_and_other_pictures_share_no_block_of_the_prefix_cache(vlms, folder):
    rows = pictured([0, 3, 0, 3], 150)
    engine = vlms(FIRST)
    once, again = engine.generate(rows), engine.generate(rows)
    check_logprobs(again, rows["images"], tiny_vlms.plain(folder(FIRST)))
    assert not torch.allclose(again["logprobs"][0], again["logprobs"][1], atol=1e-3)
    torch.testing.assert_close(again["logprobs"], once["logprobs"], atol=1e-5, rtol=0)


def test_an_image_away_from_its_tokens_is_an_error_and_the_engine_continues(vlms):
    rows = prompts_of(tiny_vlms.conversations(FIRST))
    moved = [[image.moved(2) for image in images or ()] for images in rows["images"]]
    with pytest.raises(WorkerError, match="An image has 4 placeholders") as refused:
        vlms(FIRST).generate(BatchedDataDict({**rows, "images": moved}))
    assert isinstance(refused.value.__cause__, DataError)
    assert vlms(FIRST).generate(rows)["generation_lengths"].min() > 0


class Refitted:
    """A policy and an engine of the same model, which a canary with pictures compares after each refit."""

    def __init__(self, path, engine):
        self.policy = HuggingFacePolicy(config=HFPolicyConfig(model_name=path, max_total_sequence_length=LENGTH))
        self.policy.wait_ready()
        self.model, self.engine = self.policy.group.worker.model.model, engine
        pictures = []
        for seed in (0, 1):
            image = tiny_vlms.row_image(FIRST, seed, start=0)
            middle = [tiny_vlms.PLACEHOLDER] * image.num_placeholders
            pictures.append(([tiny_vlms.OPENS, *middle, tiny_vlms.CLOSES], image))
        self.canary = make_canary(range(3, 140), num_receivers=1, max_length=LENGTH, exact=True, pictures=pictures)
        sender = WeightSender(self.policy, SharedMemoryTransport, buffer_bytes=16 * 1024, digests_are_held=False)
        self.synchronizer = WeightSynchronizer(self.policy, engine, sender, canary=RefitCanary(lambda: self.canary))

    def change_tower(self, factor):
        columns = {"input_lengths": torch.tensor([4]), "token_mask": torch.ones(1, 4), "sample_mask": torch.ones(1)}
        self.policy.train(BatchedDataDict({"input_ids": torch.tensor([[5, 6, 7, 8]]), **columns}), NLLLossFn())
        with torch.no_grad():
            for tensor in self.model.model.visual.parameters():
                tensor.mul_(factor)

    def plain(self, tmp_path):
        self.policy.save_checkpoint(str(tmp_path / "after"))
        return tiny_vlms.plain(tmp_path / "after")


@pytest.fixture
def refitted(vlms, folder, request):
    made = Refitted(folder(FIRST), vlms(FIRST, load_format="dummy", async_engine=getattr(request, "param", False)))
    yield made
    made.policy.shutdown()


def test_after_a_refit_of_the_tower_pictures_that_were_shown_before_are_computed_again(refitted, tmp_path):
    rows = pictured([0, 3], 150)
    assert refitted.synchronizer.sync()["refit/canary_error"] < 1e-5
    before = refitted.engine.generate(rows)
    refitted.change_tower(1.05)
    with pytest.raises(WeightSyncError, match="canary tokens they differ by"):
        refitted.canary.check(refitted.policy, refitted.engine)
    assert refitted.synchronizer.sync()["refit/canary_error"] < 1e-5
    after = refitted.engine.generate(rows)
    check_logprobs(after, rows["images"], refitted.plain(tmp_path))
    assert not torch.allclose(before["logprobs"], after["logprobs"], atol=1e-3)


def test_an_engine_that_keeps_features_of_older_weights_fails_the_canary(refitted, monkeypatch):
    refitted.synchronizer.sync()
    monkeypatch.setattr(refitted.engine.group.worker._running._engine, "reset_encoder_cache", lambda: None)
    refitted.change_tower(1.05)
    with pytest.raises(WeightSyncError, match="canary tokens they differ by"):
        refitted.synchronizer.sync()


@pytest.mark.parametrize("refitted", [False, pytest.param(True, marks=pytest.mark.slow, id="async")], indirect=True)
def test_rows_with_images_in_progress_at_a_refit_continue_with_the_new_tower(refitted, tmp_path):
    refitted.synchronizer.sync()
    rows = pictured([0, 3, 0, 3], 150, max_new_tokens=torch.tensor([2, 160, 160, 160]))

    refitted.change_tower(1.3)

    async def refit_after_the_first():
        items = []
        async for item in refitted.engine.generate_async(rows):
            if not items:
                refitted.synchronizer.sync()
            items.append(item)
        return items

    items = asyncio.run(refit_after_the_first())
    model, continued = refitted.plain(tmp_path), 0
    for row, output in items:
        versions = output["token_versions"][0]
        newest = sampled(output)[0] & (versions == refitted.policy.weight_version)
        continued += 0 < int(newest.sum()) < int(output["generation_lengths"])
        scores = expected(output, [rows["images"][row]], model)[0]
        torch.testing.assert_close(output["logprobs"][0][newest], scores[newest], rtol=0, atol=3e-5)
    assert continued == 3


def test_models_and_settings_without_images_are_named():
    for kind, reason in (("gemma3", "attend to each other"), ("qwen3_vl", "first layers"), ("llava", "models of type llava")):
        assert reason in why_no_images(kind)
        assert "qwen2_5_vl" in why_no_images(kind)
    assert all(why_no_images(kind) is None for kind in IMAGE_FAMILIES)
    assert VllmConfig().reads_images(Qwen2VLConfig())
    assert not VllmConfig(vllm_kwargs={"model_impl": "vllm"}).reads_images(Qwen2VLConfig())


@pytest.mark.parametrize(("family", "reason"), [("gemma3", "of type gemma3: all tokens"), ("qwen2_5_vl", "model_impl is vllm")])
def test_a_run_that_cannot_use_its_images_ends_with_exit_code_2_before_a_model_is_loaded(
    rlcore, tmp_path, monkeypatch, family, reason
):
    tiny_processors.write_processor(tmp_path / "model", family)  # without weights
    kwargs = {"model_impl": "vllm"} if family == FIRST else {}
    config = {
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 1},
        "policy": {
            "backend": "hf",
            "model_name": str(tmp_path / "model"),
            "max_total_sequence_length": 128,
            "train_global_batch_size": 4,
            "generation": {"backend": "vllm", "max_new_tokens": 3, "vllm_kwargs": kwargs},
        },
        "data": {"train": {"dataset_name": "pictures.shapes.TwoShapes", "size": 16}},
        "env": {"shapes": {"reward_fns": {"correct": "pictures.shapes.correct"}}},
        "cluster": {"backend": "in_process"},
        "checkpointing": {"enabled": False},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    monkeypatch.syspath_prepend(EXAMPLES)
    code, output = rlcore("train", str(tmp_path / "run.yaml"), folder=tmp_path)
    assert code == 2, output
    said = " ".join(output.split())
    assert "Rows of the data have images, which policy.generation cannot use" in said
    assert reason in said
    assert "run.yaml" in said
    assert "Traceback" not in said
