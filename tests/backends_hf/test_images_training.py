"""Rows with images are scored and trained as the model's own forward pass of each row alone computes them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import tiny_vlms
import torch
import transformers
from policy_cases import NLL, SGD, largest_relative_error
from safetensors.torch import load_file, save_file
from tiny_vlms import FAMILIES, PLACEHOLDER, batch, conversations, plain, plain_logprobs, plain_loss, row, words

from rl_backends_hf import HuggingFacePolicy
from rl_backends_hf.config import HFConfig, HFPolicyConfig
from rl_backends_hf.model import load_model, model_without_weights
from rl_backends_hf.scoring.scoring_model import scalar_head
from rl_core.data.images import RowImage
from rl_core.errors import NotSupportedError, WorkerError

pytestmark = pytest.mark.slow

BUDGET = {"enabled": True, "train_mb_tokens": 128, "logprob_mb_tokens": 128}
FORMS = {
    "one_row": {"logprob_batch_size": 1, "train_micro_batch_size": 1},
    "padded": {"logprob_batch_size": 4, "train_micro_batch_size": 4, "activation_checkpointing": True},
    "token_budget": {"dynamic_batching": BUDGET},
    "packed": {"sequence_packing": BUDGET},
    "packed_padded": {"sequence_packing": {**BUDGET, "sequence_length_pad_multiple": 8}},
}
FIRST = ("idefics3", "qwen2_5_vl")
"""Families that are tested in every form."""
EACH = [family if family in FIRST else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
CASES = [
    pytest.param(family, form, marks=() if family in FIRST and form in ("padded", "packed") else pytest.mark.slow)
    for family in FAMILIES
    for form in FORMS
    if family in FIRST or form in ("padded", "packed")
]


class WithoutDropout(NLL):
    """A loss with which rows may share a prefix in training."""

    allows_dropout = False


def policy_of(folder, *, hf=None, **fields):
    """A policy whose steps subtract gradients."""
    section = {"optimizer": SGD, "max_grad_norm": None, "max_total_sequence_length": 256, **fields}
    return HuggingFacePolicy(
        config=HFPolicyConfig(model_name=folder, hf_cfg={"logprob_chunk_tokens": 7, **(hf or {})}, **section)
    )


def gradients_of(policy, rows, loss=None):
    """What one step subtracts from each parameter of the policy, divided by the learning rate."""
    trained = policy.group.worker.trained_module
    before = {name: each.detach().clone() for name, each in trained.named_parameters()}
    result = policy.train(rows, loss or NLL())
    return {name: (before[name] - each.detach()) / SGD["kwargs"]["lr"] for name, each in trained.named_parameters()}, result


def plain_gradients(folder, rows):
    """The loss, and gradients above rounding: those of biases of keys are 0 in theory."""
    model = plain(folder)
    loss = plain_loss(model, rows)
    loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return float(loss.detach()), {name: each for name, each in gradients.items() if each.norm() > 1e-6}


@pytest.mark.parametrize(("family", "form"), CASES)
def test_logprobs_and_gradients_equal_plain_transformers_on_each_row_alone(vlm_folder, family, form):
    folder, rows = vlm_folder(family), conversations(family)
    policy = policy_of(folder, **FORMS[form])
    with torch.no_grad():
        expected = plain_logprobs(plain(folder), rows)
    # Float32 in another order of summation; pictures of several rows are computed together.
    torch.testing.assert_close(policy.get_logprobs(rows)["logprobs"], expected, rtol=0, atol=1e-5)
    gradients, result = gradients_of(policy, rows)
    loss, of_plain = plain_gradients(folder, rows)
    assert result["loss"] == pytest.approx(loss, rel=1e-5)
    assert any("vision" in name or "visual" in name for name in of_plain)
    assert largest_relative_error({name: gradients[name] for name in of_plain}, of_plain) < 1e-5


@pytest.mark.parametrize("family", EACH)
def test_rows_of_a_prompt_share_its_prefix_only_as_far_as_they_show_the_same_pictures(vlm_folder, caplog, family):
    caplog.set_level(logging.INFO)
    folder, rows = vlm_folder(family), tiny_vlms.samples(family)
    policy = policy_of(folder, logprob_batch_size=8, train_micro_batch_size=8)
    with torch.no_grad():
        expected = plain_logprobs(plain(folder), rows)
    torch.testing.assert_close(policy.get_logprobs(rows)["logprobs"], expected, rtol=0, atol=1e-5)
    gradients, _ = gradients_of(policy, rows, WithoutDropout())
    _, of_plain = plain_gradients(folder, rows)
    assert largest_relative_error({name: gradients[name] for name in of_plain}, of_plain) < 1e-5
    shares = family != "gemma3"  # sliding windows
    assert ("one sequence with a shared prefix" in caplog.text) == shares


@pytest.mark.parametrize("family", FIRST)
def test_a_picture_is_encoded_once_for_all_rows_of_a_microbatch(vlm_folder, monkeypatch, family):
    rows = tiny_vlms.samples(family)
    policy = policy_of(vlm_folder(family), logprob_batch_size=8)
    base, shown = policy.group.worker.model.model.base_model, []
    encode = base.get_image_features
    monkeypatch.setattr(base, "get_image_features", lambda **given: shown.append(given) or encode(**given))
    policy.get_logprobs(rows)
    distinct = {image.digest for images in rows["images"] for image in images}
    sizes = [len(each["image_grid_thw"] if "image_grid_thw" in each else each["pixel_values"]) for each in shown]
    assert sum(sizes) == len(distinct) == 4


@pytest.mark.parametrize("family", EACH)
def test_values_of_rows_with_images_are_those_of_a_head_on_plain_transformers(vlm_folder, tmp_path, family):
    rows, folder = tiny_vlms.conversations(family), vlm_folder(family)
    critic = load_model(folder, options=HFConfig(), dtype=torch.float32, head="scalar")
    assert not scalar_head(critic).weight.any()
    with torch.no_grad():
        scalar_head(critic).weight.normal_()
    critic.save_pretrained(tmp_path)
    policy = HuggingFacePolicy(config=HFPolicyConfig(model_name=str(tmp_path), head="scalar", train_micro_batch_size=4))
    values = policy.get_values(rows)["values"]
    backbone = plain(folder)
    backbone.lm_head = torch.nn.Identity()
    for number, (length, images) in enumerate(zip(rows["input_lengths"].tolist(), rows["images"], strict=True)):
        with torch.no_grad():
            hidden = tiny_vlms.plain_logits(backbone, rows["input_ids"][number, :length], images)
            expected = hidden @ scalar_head(critic).weight[0]
        # Rows are padded and computed together, so sums have another order.
        torch.testing.assert_close(values[number, :length], expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("family", EACH)
def test_a_saved_model_has_the_names_of_its_folder_and_loads_in_transformers(vlm_folder, tmp_path, family, tied):
    folder, rows = Path(vlm_folder(family, tied=tied)), conversations(family)
    policy = policy_of(str(folder), optimizer={"name": "torch.optim.SGD", "kwargs": {"lr": 0.1}})
    policy.train(rows, NLL())
    policy.save_checkpoint(tmp_path)
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path))
    assert before.keys() == after.keys()
    assert sum(not torch.equal(before[name], after[name]) for name in before) > 0.9 * len(before)
    assert policy.prepare_refit_info().keys() == before.keys()
    model, report = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] | report["unexpected_keys"]
    with torch.no_grad():
        expected = plain_logprobs(model, rows)
    torch.testing.assert_close(policy.get_logprobs(rows)["logprobs"], expected, rtol=0, atol=1e-5)
    again = policy_of(str(folder))
    again.load_checkpoint(tmp_path)
    torch.testing.assert_close(again.get_logprobs(rows)["logprobs"], expected, rtol=0, atol=1e-5)


def test_a_folder_that_lacks_weights_of_the_tower_is_refused(vlm_folder, tmp_path):
    folder = tiny_vlms.make("qwen2_5_vl", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = next(name for name in weights if "visual.blocks.1" in name)
    save_file({name: each for name, each in weights.items() if name != lost}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WorkerError, match=r"blocks\.1\S*: missing"):
        policy_of(folder).wait_ready()


@pytest.mark.parametrize(
    ("family", "freeze", "tower"),
    [
        ("idefics3", ["vision_model", "connector"], ("model.vision_model", "model.connector")),
        ("qwen2_5_vl", ["vis*"], ("model.visual",)),
    ],
)
def test_frozen_modules_have_no_gradients_and_no_optimizer_state(vlm_folder, family, freeze, tower):
    rows = conversations(family)
    policy = policy_of(vlm_folder(family), hf={"freeze": freeze}, optimizer={"kwargs": {"lr": 1e-3}})
    worker = policy.group.worker
    before = {name: each.clone() for name, each in worker.model.model.named_parameters()}
    policy.train(rows, NLL())
    moved = {name for name, each in worker.model.model.named_parameters() if not torch.equal(each, before[name])}
    frozen = {name for name in before if name.startswith(tower)}
    assert frozen
    assert moved == before.keys() - frozen
    assert len(worker.state.masters.parameters) == len(moved)
    assert policy.facts["num_trained_parameters"] == sum(before[name].numel() for name in moved)
    _, of_plain = plain_gradients(vlm_folder(family), rows)
    fresh, _ = gradients_of(policy_of(vlm_folder(family), hf={"freeze": freeze}), rows)
    expected = {name: each for name, each in of_plain.items() if name not in frozen}
    assert largest_relative_error({name: fresh[name] for name in expected}, expected) < 1e-5


def test_freeze_refuses_unknown_names_all_weights_and_combinations_without_effect(vlm_folder, monkeypatch):
    folder = vlm_folder("qwen2_5_vl")
    with pytest.raises(WorkerError, match=r"'visuall' matches no module of the model\. Did you mean 'visual'\?"):
        policy_of(folder, hf={"freeze": ["visuall"]}).wait_ready()
    with pytest.raises(WorkerError, match="nothing would be trained"):
        policy_of(folder, hf={"freeze": ["*"]}).wait_ready()
    with pytest.raises(ValueError, match="freeze has no effect with lora"):
        HFConfig(freeze=["visual"], lora={})


@pytest.mark.parametrize("family", FIRST)
def test_adapters_are_in_the_language_model_unless_a_name_is_only_in_the_tower(peft, vlm_folder, tmp_path, family):
    rows, names = conversations(family), {}
    in_tower = {"idefics3": "fc1", "qwen2_5_vl": "qkv"}[family]
    for targets in ("all-linear", ["q_proj", "v_proj"], ["q_proj", in_tower]):
        policy = policy_of(
            vlm_folder(family), hf={"lora": {"rank": 2, "target_modules": targets}}, optimizer={"kwargs": {"lr": 1e-2}}
        )
        policy.train(rows, NLL())
        adapted = set(policy.group.worker._adapters._layers)
        names[str(targets)] = {name.split(".")[1] for name in adapted}
        policy.save_checkpoint(tmp_path / family / str(len(names)))
        again = policy_of(vlm_folder(family), hf={"lora": {"adapter_path": str(tmp_path / family / str(len(names)))}})
        found = policy.get_logprobs(rows)["logprobs"]
        torch.testing.assert_close(again.get_logprobs(rows)["logprobs"], found, rtol=0, atol=1e-5)
        base = transformers.AutoModelForImageTextToText.from_pretrained(vlm_folder(family), dtype=torch.float32)
        peft.PeftModel.from_pretrained(base, tmp_path / family / str(len(names)))
        with torch.no_grad():
            torch.testing.assert_close(found, plain_logprobs(base, rows), rtol=0, atol=1e-5)
    text, tower = {"idefics3": ("text_model", "vision_model"), "qwen2_5_vl": ("language_model", "visual")}[family]
    assert list(names.values()) == [{text}, {text}, {text, tower}]


def test_rows_with_images_are_refused_by_a_model_that_reads_none(vlm_folder, model_folder):
    rows = conversations("idefics3")
    policy = policy_of(model_folder("llama"))
    assert not policy.facts["images"]
    for call in (lambda: policy.get_logprobs(rows), lambda: policy.train(rows, NLL()), lambda: policy.generate(rows)):
        with pytest.raises(
            (NotSupportedError, WorkerError), match=r"does not read images, but 4 of 6 rows have some \(the first is row 0\)"
        ):
            call()
    rows["images"] = [None] * rows.size
    policy.get_logprobs(rows)


def test_images_that_do_not_fit_their_tokens_are_refused(vlm_folder):
    policy = policy_of(vlm_folder("idefics3"))
    tokens, [image] = row("idefics3", [words(1, 5), 0, words(2, 6)])
    shifted = batch([(tokens, [image.moved(2)])])
    with pytest.raises(WorkerError, match=r"4 placeholders \(id 150\), but its tokens 7 to 12 of the row contain 3"):
        policy.get_logprobs(shifted)
    wrong = RowImage(
        digest=image.digest, start=image.start, length=3, placeholder_id=PLACEHOLDER, num_placeholders=2, inputs=image.inputs
    )
    with pytest.raises(WorkerError, match="computes 4 features for pictures with 2 placeholders"):
        policy.get_logprobs(batch([(tokens, [wrong])]))


def test_a_text_model_of_a_family_with_both_is_loaded_without_a_tower(tmp_path):
    text = transformers.Gemma3TextConfig(**{**tiny_vlms._TEXT, "head_dim": 8})
    transformers.AutoModelForCausalLM.from_config(text).save_pretrained(tmp_path)
    model = model_without_weights(str(tmp_path), options=HFConfig())
    assert type(model).__name__ == "Gemma3ForCausalLM"
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gemma3_text"


def test_a_vision_language_model_of_another_family_is_refused_by_name(tmp_path):
    text = {"model_type": "gemma", **tiny_vlms._TEXT, "head_dim": 8}
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=tiny_vlms._siglip(), projection_dim=32)
    config.save_pretrained(tmp_path)
    with pytest.raises(NotSupportedError, match=r"of type paligemma are not supported, but those of type gemma3, idefics3"):
        model_without_weights(str(tmp_path), options=HFConfig())
