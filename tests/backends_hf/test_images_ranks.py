"""Ranks that share a vision-language model, with images on one of them, train as one rank."""

from pathlib import Path

import pytest
import torch
from policy_cases import largest_relative_error
from rank_processes import RankProgram
from tiny_vlms import OF_RANKS, plain, plain_logprobs, plain_loss, rows_of_ranks

from rl_backends_base import CheckpointNames
from rl_backends_hf.model import load_model
from rl_backends_hf.model_options import HFConfig
from rl_core.backend import weights_of
from rl_core.rendezvous.interfaces import free_port

FAMILIES = ("gemma3", "idefics3", "qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="module")
def results(vlm_folder, tmp_path_factory):
    """Folder of the results of two real processes."""
    models, out = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("ranks")
    for family in FAMILIES:
        (models / family).symlink_to(vlm_folder(family))
    ports = {free_port("127.0.0.1") for _ in range(60)}
    assert len(ports) >= len(FAMILIES) * len(OF_RANKS)
    RankProgram(Path(__file__).with_name("image_ranks.py"), models, out, *sorted(ports)).wait()
    return out


def gradients_by_checkpoint_name(folder, model):
    """Gradients above rounding, by the names that a policy exports."""
    loaded = load_model(folder, options=HFConfig(), dtype=torch.float32)
    names = CheckpointNames(loaded, {name: each.shape for name, each in weights_of(loaded).items()})
    of_module = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {name: each for name, each in names.split(of_module.items()) if each.norm() > 1e-6}


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "precision", "freeze"), OF_RANKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_train_as_one_although_one_has_no_images(vlm_folder, results, family, mode, precision, freeze):
    found = [torch.load(results / f"{family}-{mode}-{precision}-{rank}.pt") for rank in range(2)]
    model, rows = plain(vlm_folder(family)), rows_of_ranks(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (freeze and ".vis" in name))
    loss = plain_loss(model, rows)
    loss.backward()
    with torch.no_grad():
        expected = plain_logprobs(model, rows)
    gradients = gradients_by_checkpoint_name(vlm_folder(family), model)
    logprobs = torch.cat([each["logprobs"] for each in found])
    exact = precision == "float32"
    # bfloat16 has 8 bits of precision, with which whole nats are rounded to hundredths; a missing picture changes tenths.
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5 if exact else 0.25)
    assert sum(each["loss"] for each in found) == pytest.approx(float(loss.detach()), rel=1e-5 if exact else 2e-2)
    steps = {name: found[0]["steps"][name] for name in gradients}
    assert largest_relative_error(steps, gradients) < (1e-5 if exact else 0.3)
    for each in found:
        assert {name: tuple(entry) for name, entry in each["manifest"].items()} == each["sent"]
    still = [name for name, step in found[0]["steps"].items() if not step.any()]
    if freeze:
        assert {name for name in found[0]["steps"] if "vision_" in name or "visual" in name} == {*still}
