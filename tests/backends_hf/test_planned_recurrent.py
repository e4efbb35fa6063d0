"""`rlcore plan` for models whose layers differ: recurrent states, convolutions, latents, dense layers and experts."""

import pytest
import torch
import transformers
from family_configs import tiny_config
from hypothesis import given
from hypothesis import strategies as st

from rl_backends_hf import planned_memory
from rl_backends_hf.config import HFConfig, HFGenerationConfig, HFPolicyConfig
from rl_backends_hf.matrix_sizes import matrix_sizes
from rl_backends_hf.memory_trace import weighted_depths
from rl_backends_hf.planned_memory import EngineMemory, PolicyMemory
from rl_backends_hf.sampling.cache_budget import RowBytes
from rl_backends_hf.sampling.sampler import Sampler
from rl_backends_hf.transformers_internals import cache_keyword
from rl_core.data.batched_data_dict import BatchedDataDict

ROWS, PROMPT, NEW = 2, 20, 6
SLOW = (
    *("lfm2", "jamba", "falcon_h1", "kimi_linear", "olmo_hybrid", "deepseek_v32", "granitemoehybrid", "bamba", "gemma2"),
    "qwen3_5_text",
)
FAMILIES = ("qwen3_next", "mamba", "deepseek_v3", *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW))


def config_of(family, **fields):
    config = tiny_config(family).get_text_config() if family != "falcon_h1" else falcon()
    for name, value in {"eos_token_id": None, **fields}.items():
        setattr(config, name, value)
    if family == "gemma2":
        config.attn_logit_softcapping = None  # SDPA ignores it
    return config


def falcon():
    sizes = {"vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    mamba = {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
    return transformers.FalconH1Config(**sizes, **mamba, intermediate_size=16)


def model_of(config):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return model


def tensors_of(layer):
    states = [getattr(layer, name, None) or {} for name in ("conv_states", "recurrent_states")]
    kept = [each for state in states for each in state.values()]
    kept += [getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")]
    return [each for each in kept if each is not None]


def sampled_bytes(model):
    """Bytes of the engine's cache after its last step, without free slots and columns."""
    found = []

    def observe(module, args, kwargs, output):
        if (cache := kwargs.get(cache_keyword(model))) is None:
            return
        size = sum(each.nbytes for layer in cache.layers for each in tensors_of(layer))
        slots = getattr(cache, "slots", None)
        found.append(size if slots is None else size * slots.used * slots.width // (slots.capacity * slots.columns))

    handle = model.register_forward_hook(observe, with_kwargs=True)
    try:
        ids = torch.randint(3, 90, (ROWS, PROMPT), generator=torch.Generator().manual_seed(0))
        rows = BatchedDataDict(input_ids=ids, input_lengths=torch.full((ROWS,), PROMPT), sample_seeds=torch.arange(ROWS))
        output = Sampler(model, HFGenerationConfig(max_new_tokens=NEW)).generate(rows)
    finally:
        handle.remove()
    assert output["generation_lengths"].tolist() == [NEW] * ROWS
    return found[-1]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_engine_keeps_of_a_row_is_that_of_its_real_cache(tmp_path, family):
    config = config_of(family)
    config.save_pretrained(tmp_path)
    section = HFGenerationConfig(model_name=str(tmp_path), max_new_tokens=NEW - 1)  # the last token is not computed
    phases = EngineMemory(section).by_phase(rows=ROWS, prompt=PROMPT, on_gpu=True, limit=None, shares_weights=False)
    kept = {part: size for part, size in phases["rollout"].items() if part != "logits"}
    assert sum(kept.values()) == sampled_bytes(model_of(config))
    if family == "mamba":
        assert set(kept) == {"recurrent states"}


def test_the_states_of_a_gated_delta_rule_have_the_sizes_of_its_heads():
    """Qwen3-Next: a matrix per value head in float32, and the inputs of the convolution."""
    config = config_of("qwen3_next")
    recurrent = config.layer_types.count("linear_attention")
    matrices = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    heads = {of: getattr(config, f"linear_num_{of}_heads") for of in ("key", "value")}
    keys, values = (count * getattr(config, f"linear_{of}_head_dim") for of, count in heads.items())
    row = RowBytes.of_model(model_of(config))
    convolved = (2 * keys + values) * 4
    assert row.state - 4 * recurrent * matrices in {recurrent * convolved * width for width in (3, 4)}
    attention = (len(config.layer_types) - recurrent) * 2 * config.num_key_value_heads * config.head_dim * 4
    assert row.growth(1) == attention
    assert row.of(10) == row.state + 10 * attention


def test_a_step_of_sampling_reads_keys_and_values_and_reads_and_writes_states(tmp_path):
    config = config_of("qwen3_next")
    config.save_pretrained(tmp_path)
    row, engine = RowBytes.of_model(model_of(config)), EngineMemory(HFGenerationConfig(model_name=str(tmp_path)))
    found = engine.decoding(rows=5, length=16, limit=2**30)
    assert (found["rows"], found["token"], found["state"]) == (5, row.growth(16), 2 * row.state)
    few = engine.decoding(rows=50, length=16, limit=found["weights"] + int(3.5 * row.of(16) / 0.8))
    assert few["rows"] == 3


def test_a_window_is_kept_and_tokens_before_it_are_not():
    row = RowBytes(state=100, rates=((8, None), (2, 4)))
    assert [row.of(length) for length in (1, 4, 10)] == [110, 140, 188]
    assert [row.growth(length) for length in (1, 3, 4, 10)] == [10, 10, 8, 8]


@given(st.lists(st.integers(0, 3), min_size=5, max_size=40), st.lists(st.floats(1, 1000), min_size=4, max_size=4))
def test_depths_are_weighted_so_that_what_each_kind_of_layer_adds_is_counted_as_often_as_it_occurs(kinds, sizes):
    def traced(depth):
        return 17.0 + sum(sizes[kind] for kind in kinds[:depth])

    weighted = weighted_depths(kinds, least=2, step=2)
    assert sum(weight * traced(depth) for depth, weight in weighted) == pytest.approx(traced(len(kinds)), rel=1e-6)
    assert len(weighted) <= len({*kinds}) + 1


def test_layers_of_one_kind_are_traced_to_two_and_four():
    assert weighted_depths(["layer"] * 32, least=2, step=2) == [(2, pytest.approx(-14)), (4, pytest.approx(15))]


HYBRID = {"num_hidden_layers": 12, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3}
DEEP = [
    ("qwen3_next", HYBRID),
    pytest.param("deepseek_v3", {"num_hidden_layers": 9, "first_k_dense_replace": 3}, marks=pytest.mark.slow),
    pytest.param("jamba", {"num_hidden_layers": 12, "attn_layer_period": 4}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "fields"), DEEP)
def test_a_model_with_several_kinds_of_layers_is_extrapolated_to_what_all_layers_need(tmp_path, monkeypatch, family, fields):
    config_of(family, **fields).save_pretrained(tmp_path)
    config = HFPolicyConfig(model_name=str(tmp_path), hf_cfg=HFConfig(logprob_chunk_tokens=7))
    shape = {"ranks": 1, "train": (2, 32), "several": False, "score": None, "reference": False, "on_gpu": False}
    extrapolated = PolicyMemory(config).by_phase(**shape)["train"]
    monkeypatch.setattr(planned_memory, "_DEPTHS", (2, 99))
    whole = PolicyMemory(config).by_phase(**shape)["train"]
    assert extrapolated["activations"] == pytest.approx(whole["activations"], rel=0.01)
    assert sum(extrapolated.values()) == pytest.approx(sum(whole.values()), rel=0.03)


def test_recurrent_layers_have_no_flops_of_attention_and_latent_attention_has_those_of_its_heads():
    hybrid, latent = config_of("qwen3_next"), config_of("deepseek_v3")
    attending = hybrid.layer_types.count("full_attention")
    assert matrix_sizes(model_of(hybrid))["attention"] == attending * hybrid.num_attention_heads * hybrid.head_dim
    assert matrix_sizes(model_of(config_of("mamba")))["attention"] == 0
    width = (latent.qk_nope_head_dim + latent.qk_rope_head_dim + latent.v_head_dim) / 2
    assert matrix_sizes(model_of(latent))["attention"] == latent.num_hidden_layers * latent.num_attention_heads * width


def test_kernels_for_recurrent_layers_are_named_as_not_counted(tmp_path):
    config_of("falcon_h1").save_pretrained(tmp_path)
    assert "kernels for recurrent layers" in PolicyMemory(HFPolicyConfig(model_name=str(tmp_path))).not_counted()[0]
