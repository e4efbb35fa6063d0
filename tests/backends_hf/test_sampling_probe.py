"""The engine compares its sampling with the model's own forward pass before it serves a run, and refuses a model by name."""

import inspect

import pytest
import torch
import transformers

from rl_backends_hf import HuggingFaceGeneration
from rl_backends_hf.config import HFGenerationConfig
from rl_backends_hf.sampling import sampler as sampler_module
from rl_backends_hf.sampling.sampler import Sampler, probe_sampling
from rl_core.errors import NotSupportedError, WorkerError

SIZES = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def llama(positions=64):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**SIZES, **sizes, max_position_embeddings=positions, initializer_range=0.3)
    return transformers.LlamaForCausalLM(config).eval()


def test_a_model_that_counts_positions_from_its_cache_is_refused_by_the_engine_with_its_class(tmp_path):
    sizes = {"d_model": 32, "decoder_ffn_dim": 48, "decoder_layers": 2, "decoder_attention_heads": 4, "init_std": 0.3}
    config = transformers.BartConfig(**SIZES, **sizes, encoder_layers=2, encoder_attention_heads=4, is_decoder=True)
    transformers.BartForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(WorkerError, match=r"BartForCausalLM: log-probabilities of sampled tokens differ by \d\.\d+ from those"):
        HuggingFaceGeneration(model_name=str(tmp_path), max_new_tokens=2).wait_ready()


def test_an_error_of_the_models_code_is_a_refusal_that_quotes_it():
    model = llama()

    def forward(*args, **kwargs):
        raise KeyError("layer 7")

    model.model.layers[1].mlp.forward = forward
    with pytest.raises(NotSupportedError, match=r"LlamaForCausalLM cannot be sampled from; .* raised KeyError: .layer 7"):
        probe_sampling(Sampler(model))


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(lambda keywords: keywords | {"position_ids": keywords["position_ids"] + 1}, id="positions"),
        pytest.param(lambda keywords: keywords | {"attention_mask": None}, id="mask"),
    ],
)
def test_a_wrong_position_or_mask_in_a_decoding_step_is_found(mistake, monkeypatch):
    model = llama()
    forward = model.forward

    def with_mistake(*, input_ids, **keywords):
        is_step = input_ids.shape == (3, 1)
        return forward(input_ids=input_ids, **(mistake(keywords) if is_step else keywords))

    with_mistake.__signature__ = inspect.signature(forward)
    probe_sampling(Sampler(model))
    monkeypatch.setattr(model, "forward", with_mistake)
    with pytest.raises(NotSupportedError, match="log-probabilities of sampled tokens differ"):
        probe_sampling(Sampler(model))


@pytest.fixture
def compared(monkeypatch):
    """The rows that were compared: length and number of sampled tokens of each."""
    rows, compare = [], sampler_module._largest_difference

    def recorded(sampler, output):
        lengths = output["unpadded_sequence_lengths"], output["generation_lengths"]
        rows.extend(zip(*(each.tolist() for each in lengths), strict=True))
        return compare(sampler, output)

    monkeypatch.setattr(sampler_module, "_largest_difference", recorded)
    return rows


@pytest.mark.parametrize(
    ("positions", "rows"),
    [(3, []), (4, [(4, 3)] * 3), (8, [(8, 3)] * 3), (40, [(36, 3), (36, 3), (23, 3)])],
)
def test_a_model_of_few_positions_is_compared_as_far_as_it_goes(compared, positions, rows):
    probe_sampling(Sampler(llama(positions)))
    assert compared == rows


def test_weights_that_are_not_finite_are_left_to_the_first_call(compared):
    model = llama()
    model.lm_head.weight.data.fill_(float("nan"))
    probe_sampling(Sampler(model))
    assert compared == []


def test_settings_of_the_run_do_not_change_what_is_compared(compared):
    shape = {"temperature": 0.1, "top_k": 2, "hf_cfg": {"repetition_penalty": 1.5}}
    probe_sampling(Sampler(llama(), HFGenerationConfig(**shape, max_new_tokens=1, stop_token_ids=list(range(3, 96)))))
    assert compared == [(36, 3), (36, 3), (23, 3)]


def test_full_memory_is_not_a_refusal():
    model = llama()

    def forward(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    model.model.layers[1].mlp.forward = forward
    with pytest.raises(RuntimeError, match="allocate memory"):
        probe_sampling(Sampler(model))
