"""A scalar head under every parallel layout equals Transformers: values, gradients, saved folder; and it learns from zero."""

import megatron_cases as cases
import megatron_layouts as layouts
import pytest
import torch
import transformers

from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.errors import CheckpointError, NotSupportedError, UserError

pytestmark = pytest.mark.megatron
over_ranks = [pytest.mark.slow, pytest.mark.timeout(1200)]


def read(out, name):
    return [torch.load(out / f"{name}-{rank}.pt", weights_only=False) for rank in range(2)]


def in_order(layout, found, key):
    """The rows of both ranks in batch order; without data parallelism, each rank has all rows."""
    if layouts.grid_of(layout).get_axis_size("data") == 1:
        assert torch.equal(found[0][key], found[1][key])
        found = found[:1]
    rows = torch.cat([rank[key] for rank in found])
    order = found[0]["order"]
    return rows if order is None else rows[torch.tensor(order).argsort()]


def trained_on_transformers(folder, rows, steps):
    worker = HFPolicyWorker(cases.make_context(), HFPolicyConfig(model_name=str(folder), head="scalar", **layouts.TRAINING))
    worker.setup()
    before = worker.get_values(rows)["values"]
    results = [worker.train(rows, cases.SquaredError(), counts=cases.counts_of(rows))[0] for _ in range(steps)]
    return before, results, worker.get_values(rows)["values"]


@pytest.mark.parametrize("name", layouts.tiered("values", layouts.VALUES))
class TestOverRanks:
    pytestmark = over_ranks

    def test_values_are_those_of_transformers_and_come_back_from_a_checkpoint(self, models, out, name):
        layout, found, rows = layouts.LAYOUTS[name], read(out, name), cases.make_rows()
        with torch.no_grad():
            expected, _ = cases.plain_values(models / layout.kind, rows)
        assert float(expected.abs().max()) > 0.5
        for key in ("values", "again"):
            # Two orders of summation in float32 over four layers.
            assert float((in_order(layout, found, key) - expected).abs().max()) < 5e-6

    def test_the_gradient_is_that_of_one_plain_backward_pass(self, models, out, name):
        layout, found, rows = layouts.LAYOUTS[name], read(out, name), cases.make_rows()
        values, model = cases.plain_values(models / layout.kind, rows)
        mask = rows["token_mask"] * rows["sample_mask"].unsqueeze(1)
        loss = cases.squared_error(values, mask, rows["weights"]) / mask.sum()
        loss.backward()
        expected = cases.checkpoint_gradients(model)
        norm = float(torch.stack([gradient.norm() for gradient in expected.values()]).norm())
        for rank in found:
            gradients = {key: (rank["before"][key] - rank["after"][key]) / 1e4 for key in rank["before"]}
            assert cases.largest_relative_error(gradients, expected) < 1e-5
            assert rank["step"].grad_norm == pytest.approx(norm, rel=2e-6)
            assert rank["manifest"]["score.weight"] == ((1, 32), "float32")
            assert "lm_head.weight" not in rank["manifest"]

    def test_a_fresh_head_begins_at_zero_and_learns_as_on_transformers(self, models, out, name):
        layout, found, rows = layouts.LAYOUTS[name], read(out, name), cases.make_rows()
        before, results, after = trained_on_transformers(models / layout.kind.removesuffix("-value"), rows, layouts.STEPS)
        assert not in_order(layout, found, "zeros").any()
        assert not before.any()
        trained_values = in_order(layout, found, "trained_values")
        assert float(after.abs().max()) > 0.01
        # Steps of Adam, which divides small gradients by their own size, rounding included.
        assert float((trained_values - after).abs().max()) < 2e-4
        for rank in found:
            assert [step.grad_norm for step in rank["fresh"]] == pytest.approx([s.grad_norm for s in results], rel=1e-4)

    def test_the_saved_folder_is_a_transformers_classifier(self, models, out, name):
        layout, rows = layouts.LAYOUTS[name], cases.make_rows()
        config = transformers.AutoConfig.from_pretrained(out / name / "w")
        assert config.num_labels == 1
        assert config.architectures[0].endswith("ForSequenceClassification")
        with torch.no_grad():
            found, expected = (cases.plain_values(folder, rows)[0] for folder in (out / name / "w", models / layout.kind))
        assert torch.equal(found, expected)


def test_a_model_of_another_head_is_refused_before_anything_starts(policy, models, tmp_path):
    with pytest.raises(UserError, match="does not predict tokens"):
        policy("qwen3-value")
    config = transformers.AutoConfig.from_pretrained(models / "qwen3-value")
    config.num_labels = 3
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "three")
    with pytest.raises(UserError, match="with 3 labels, but a scalar head has one"):
        policy(tmp_path / "three", head="scalar")


def test_a_critic_scores_no_tokens_samples_nothing_and_sends_no_weights(policy):
    made = policy("qwen3", head="scalar")
    for ask in (made.get_logprobs, made.get_reference_policy_logprobs):
        with pytest.raises(NotSupportedError, match="head: scalar"):
            ask(cases.make_rows())
    for ask, says in (
        (lambda: made.generate(cases.make_prompts()), "cannot generate text"),
        (made.prepare_refit_info, "a generation engine"),
    ):
        with pytest.raises(Exception, match=says) as error:
            ask()
        assert isinstance(error.value.__cause__, NotSupportedError)


def test_a_checkpoint_of_another_head_is_refused(policy, models, tmp_path):
    made = policy("qwen3", head="scalar")
    with pytest.raises(CheckpointError, match=r"no tensor score\.weight"):
        made.load_checkpoint(models / "qwen3")
    made.save_checkpoint(tmp_path / "w", tmp_path / "o")
    made.shutdown()
    with pytest.raises(Exception, match="does not predict tokens"):
        policy("qwen3").load_checkpoint(tmp_path / "w")
