"""Model dropout is disabled if a loss compares log-probabilities of two passes, and enabled in SFT."""

import pytest
import torch
import transformers

from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.policy import LossFunction
from rl_train.algorithms import ClippedPGLossFn, DPOLossFn, NLLLossFn

CONFIGS = {
    # All kinds of dropout that Transformers has by default in GPT-2: embeddings, attention, residual connections.
    "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    # Dropout in the forward pass of the layer itself, and whole layers that are skipped.
    "opt": lambda: transformers.OPTConfig(
        vocab_size=64,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        dropout=0.3,
        layerdrop=0.3,
    ),
}


class Compared(LossFunction):
    """The likelihood, and how far log-probabilities are from those of the scoring pass."""

    required_keys = frozenset({"prev_logprobs"})
    metric_reductions = {"apart": "max"}  # noqa: RUF012

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(1)
        apart = ((next_token_logprobs - data["prev_logprobs"]) * mask).abs().max().detach()
        return -(next_token_logprobs * mask).sum() / global_valid_toks, {"apart": apart}


class ComparedUnderDropout(Compared):
    allows_dropout = True


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = {}

    def of(kind):
        if kind not in made:
            with torch.random.fork_rng():
                torch.manual_seed(3)
                model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]())
            made[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(made[kind])
        return str(made[kind])

    return of


def difference(parts, folder, loss_fn, **fields):
    """Largest |log p in training - log p when scored|, in nats, before the first step has changed anything."""
    worker = HFPolicyWorker(parts.make_context(), parts.make_config(folder, **fields))
    worker.setup()
    rows = parts.make_rows()
    rows["input_ids"] %= 64
    scored = worker.get_logprobs(BatchedDataDict({key: rows[key] for key in ("input_ids", "input_lengths")}))
    rows["prev_logprobs"] = scored["logprobs"]
    return worker.train(rows, loss_fn, counts=parts.counts_of(rows))[0].metrics["apart"]


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_log_probabilities_equal_scored_ones_before_the_first_step(parts, folder, kind, checkpointing):
    # Float32 and other microbatches: only rounding.
    assert difference(parts, folder(kind), Compared(), activation_checkpointing=checkpointing) < 1e-5


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_loss_that_allows_dropout_trains_under_it(parts, folder, kind):
    assert difference(parts, folder(kind), ComparedUnderDropout()) > 1e-3


def test_the_dropout_of_lora_adapters_stays_on_where_that_of_the_model_is_off(parts, folder):
    pytest.importorskip("peft")
    worker = HFPolicyWorker(parts.make_context(), parts.make_config(folder("gpt2"), hf={"lora": {"rank": 4, "dropout": 0.5}}))
    worker.setup()
    seen = {}
    for name, module in worker.model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:
            module.register_forward_hook(lambda module, *_, name=name: seen.update({name: module.training}))
    rows = parts.make_rows()
    rows["input_ids"] %= 64
    rows["prev_logprobs"] = torch.zeros(rows["input_ids"].shape)
    worker.train(rows, Compared(), counts=parts.counts_of(rows))
    assert {name for name, on in seen.items() if on} == {name for name in seen if "lora_dropout" in name} != set()


def test_only_the_supervised_loss_allows_dropout():
    assert NLLLossFn.allows_dropout
    assert not any(loss.allows_dropout for loss in (ClippedPGLossFn, DPOLossFn, LossFunction))
