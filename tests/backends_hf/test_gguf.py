"""A GGUF file is the model that it describes, or is refused with the value that Transformers does not read."""

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf_files import write_gguf
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rl_backends_hf import HuggingFacePolicy
from rl_backends_hf.config import HFModelConfig
from rl_backends_hf.model import load_model, model_without_weights
from rl_backends_vllm.model_folder import model_files
from rl_core.data.tokenizer import load_tokenizer
from rl_core.errors import ConfigError, DataError, UserError

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0}
_KEY = "llama.rope.scaling."


def llama3_divisors(writer, config):
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]
    width = config.hidden_size // config.num_attention_heads
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, width, 2) / width)
    writer.add_tensor("rope_freqs.weight", (plain / scaled).float().numpy())


def linear(writer, config):
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def yarn(writer, config):
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(64)
    writer.add_float32(_KEY + "yarn_beta_fast", 16.0)
    writer.add_float32(_KEY + "yarn_beta_slow", 2.0)


@pytest.mark.parametrize(
    ("scaling", "write"),
    [(_LLAMA3, llama3_divisors), ({"rope_type": "linear", "factor": 4.0}, linear), (_YARN, yarn)],
    ids=["llama3", "linear", "yarn"],
)
def test_a_model_of_a_gguf_file_has_the_rope_scaling_of_the_file(model_folder, parts, tmp_path, scaling, write):
    config = transformers.AutoConfig.from_pretrained(model_folder("llama"))
    config.rope_parameters = {**config.rope_parameters, **scaling}
    plain = transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama"), config=config)
    file = tmp_path / "tiny.gguf"
    write_gguf(file, plain, lambda writer: write(writer, config))
    policy, rows = HuggingFacePolicy(str(file)), parts.make_rows()
    with torch.no_grad():
        expected = parts.plain_logprobs(plain, rows)
    torch.testing.assert_close(policy.get_logprobs(rows)["logprobs"], expected, rtol=0, atol=1e-4)
    policy.save_checkpoint(tmp_path / "saved")
    saved = transformers.AutoConfig.from_pretrained(tmp_path / "saved").rope_parameters
    assert saved == pytest.approx({**config.rope_parameters, **scaling})
    options = {"tokenizer_name": None, "trust_remote_code": False, "temp_dir": tmp_path}
    with pytest.raises(ConfigError, match=r"has rope scaling \(.*Use the folder"), model_files(str(file), **options):
        pass


@pytest.mark.parametrize(
    ("add", "named"),
    [
        (lambda w: w.add_tensor("rope_freqs.weight", np.asarray([1, 2, 1, 5], np.float32)), "the tensor rope_freqs.weight"),
        (lambda w: w.add_tensor("rope_factors_long.weight", np.ones(4, np.float32)), "the tensor rope_factors_long.weight"),
        (lambda w: (w.add_string(_KEY + "type", "longrope"), w.add_float32(_KEY + "factor", 4.0)), "scaling.factor` (4.0)"),
        (lambda w: (yarn(w, None), w.add_float32(_KEY + "yarn_log_multiplier", 0.1)), "scaling.yarn_log_multiplier` (0.1"),
        (lambda w: w.add_attn_logit_softcapping(50.0), "`llama.attn_logit_softcapping` (50.0)"),
        (lambda w: w.add_final_logit_softcapping(30.0), "`llama.final_logit_softcapping` (30.0)"),
        (lambda w: w.add_sliding_window(16), "`llama.attention.sliding_window` (16)"),
        (lambda w: w.add_attention_scale(0.5), "`llama.attention.scale` (0.5)"),
        (lambda w: w.add_logit_scale(0.5), "`llama.logit_scale` (0.5)"),
        (lambda w: w.add_residual_scale(0.5), "`llama.residual_scale` (0.5)"),
        (lambda w: w.add_expert_used_count(2), "`llama.expert_used_count` (2)"),
        (lambda w: w.add_key_length(16), "`llama.attention.key_length` (16)"),
        (lambda w: w.add_float32("llama.a_new_key", 3.0), "`llama.a_new_key` (3.0)"),
    ],
)
def test_metadata_and_tensors_that_transformers_does_not_read_are_refused_by_name(model_folder, tmp_path, add, named):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama")), add)
    with pytest.raises(UserError) as refused:
        load_model(str(file), options=HFModelConfig(), dtype=torch.float32)
    assert str(refused.value).startswith(f"{file}: Transformers does not read")
    assert named in str(refused.value)
    with pytest.raises(UserError, match="with its safetensors and tokenizer"):
        model_without_weights(str(file), options=HFModelConfig())


@pytest.mark.parametrize("scaling", [gguf.RopeScalingType.NONE, gguf.RopeScalingType.LINEAR])
def test_metadata_that_says_what_transformers_reads_is_accepted(model_folder, tmp_path, scaling):
    plain, file = transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama")), tmp_path / "tiny.gguf"

    def add(writer):
        writer.add_rope_dimension_count(8)
        writer.add_key_length(8)
        writer.add_value_length(8)
        writer.add_rope_scaling_type(scaling)
        writer.add_rope_scaling_factor(0.0)
        writer.add_rope_scaling_finetuned(False)
        writer.add_expert_count(0)

    write_gguf(file, plain, add)
    model = model_without_weights(str(file), options=HFModelConfig())
    assert model.config.rope_parameters["rope_type"] == "default"
    with model_files(str(file), tokenizer_name=None, trust_remote_code=False, temp_dir=tmp_path):
        pass


def write_tokenizer(path, model, *, tokens, add):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_file(folder, **settings):
    """Digits and a word, which no merges lead to."""
    tokens = ["<s>", "</s>", *"ab12", "ab", "12", "1a", "abab"]

    def add(writer):
        writer.add_token_merges(["a b", "1 2", "1 a"])
        for name, value in settings.items():
            (writer.add_bool if isinstance(value, bool) else writer.add_string)(f"tokenizer.ggml.{name}", value)

    return write_tokenizer(folder / "words.gguf", "gpt2", tokens=tokens, add=add)


@pytest.mark.parametrize(
    ("settings", "ids"),
    [
        ({"pre": "gpt-2"}, [6]),
        ({"pre": "gpt-2", "add_bos_token": True}, [0, 6]),
        ({"pre": "gpt-2", "add_bos_token": True, "add_eos_token": True}, [0, 6, 1]),
        ({"pre": "llama-bpe"}, [0, 6]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [6]),
        ({"add_bos_token": False}, [6]),
    ],
)
def test_the_tokenizer_of_a_gguf_file_adds_the_start_and_end_tokens_that_the_file_says(tmp_path, settings, ids):
    tokenizer = load_tokenizer(byte_level_file(tmp_path, **settings))
    assert tokenizer("ab")["input_ids"] == ids
    assert tokenizer("ab", add_special_tokens=False)["input_ids"] == [6]
    tokenizer.save_pretrained(tmp_path / "saved")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")("ab")["input_ids"] == ids


def test_the_tokenizer_of_a_gguf_file_splits_as_the_file_says(tmp_path):
    encoded = {}
    for pre in ("gpt-2", "llama-bpe"):
        tokenizer = load_tokenizer(byte_level_file(tmp_path, pre=pre, add_bos_token=False))
        encoded[pre] = [tokenizer.tokenize(text) for text in ("12", "1a", "abab")]
    assert encoded["gpt-2"] == [["12"], ["1", "a"], ["ab", "ab"]]
    assert encoded["llama-bpe"] == [["12"], ["1", "a"], ["abab"]], "a word of the vocabulary, whatever its merges"
    with pytest.raises(DataError, match=r"does not split text as the file says \(tokenizer\.ggml\.pre: deepseek-v3\)"):
        load_tokenizer(byte_level_file(tmp_path, pre="deepseek-v3"))


def sentencepiece_file(folder, **settings):
    tokens = ["<s>", "</s>", "<unk>", "a", "b", "▁", "ab", "▁ab"]

    def add(writer):
        writer.add_token_scores([0.0, 0.0, 0.0, -6.0, -6.0, -6.0, -1.0, -2.0])
        writer.add_unk_token_id(2)
        for name, value in settings.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)

    return write_tokenizer(folder / "pieces.gguf", "llama", tokens=tokens, add=add)


def test_a_sentencepiece_tokenizer_adds_the_start_token_unless_its_file_says_otherwise(tmp_path):
    assert load_tokenizer(sentencepiece_file(tmp_path)).tokenize("ab") == ["▁ab"]
    assert load_tokenizer(sentencepiece_file(tmp_path))("ab")["input_ids"] == [0, 7]
    assert load_tokenizer(sentencepiece_file(tmp_path, add_bos_token=False))("ab")["input_ids"] == [7]
    with pytest.raises(DataError, match="add_space_prefix"):
        load_tokenizer(sentencepiece_file(tmp_path, add_space_prefix=False))
