"""The tokenizer of a model is that of its tokenizer.json, whatever class its config names."""

import pickle
import tempfile
from pathlib import Path

import pytest
import transformers
from model_folders import TEMPLATE, byte_level, make, unigram, write_tokenizer
from packaging.version import Version
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from rl_backends_vllm.model_folder import model_files
from rl_core.data.tokenizer import load_tokenizer
from rl_core.errors import DataError

_TEXTS = (
    "a 12 b",
    "  What is 1234567 + 89?\n\n\tif x != 3:  return 'The Sum'",
    "naïve Ünïcode — 日本語 🙂",
    "<|im_start|>user\n 12 <|im_end|>  <s> ab",
    "",
)


def with_digits():
    tokenizer = byte_level()
    digits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(digits)
    return tokenizer


def lowercase():
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def whole_words():
    tokenizer = byte_level()
    tokenizer.model.ignore_merges = True
    return tokenizer


@pytest.mark.parametrize("make_tokenizer", [byte_level, with_digits, lowercase, whole_words, unigram])
@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2TokenizerFast", "GemmaTokenizer"])
def test_a_tokenizer_encodes_and_decodes_as_its_file_says(tmp_path, make_tokenizer, name):
    write_tokenizer(tmp_path, make_tokenizer(), tokenizer_class=name)
    tokenizer, published = load_tokenizer(tmp_path), Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in _TEXTS:
        ids = published.encode(text).ids
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == published.decode(ids, skip_special_tokens=False)
    names = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert names == ("<s>", "<|im_end|>", "<pad>", "<unk>")
    assert (tokenizer.chat_template, tokenizer.model_max_length, len(tokenizer)) == (TEMPLATE, 128, published.get_vocab_size())


def test_special_tokens_that_only_the_class_has_stay(tmp_path):
    none = {"bos_token": None, "eos_token": None, "pad_token": None, "unk_token": None, "chat_template": None}
    write_tokenizer(tmp_path, with_digits(), tokenizer_class="LlamaTokenizer", **none)
    if Version(transformers.__version__) >= Version("5.22"):  # it does not ask the class for them
        with pytest.raises(DataError, match="has neither a padding nor an EOS token"):
            load_tokenizer(tmp_path)
        return
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.tokenize("12") == ["1", "2"]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_id) == ("<s>", "</s>", 2)


@pytest.mark.parametrize(("name", "may_differ"), [("GPT2Tokenizer", False), ("LlamaTokenizer", True), ("AcmeTokenizer", False)])
def test_a_tokenizer_is_loaded_a_second_time_only_if_it_differs(tmp_path, name, may_differ):
    write_tokenizer(tmp_path, byte_level(), tokenizer_class=name)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.tokenize("a 12 b") == ["a", "Ġ12", "Ġb"]
    differs = AutoTokenizer.from_pretrained(tmp_path).tokenize("a 12 b") != ["a", "Ġ12", "Ġb"]  # until Transformers 5.21
    assert tokenizer.is_corrected == differs
    assert may_differ or not differs


def test_vllm_and_copies_in_other_processes_have_the_same_tokenizer(tmp_path):
    folder = make(tmp_path / "model", "DeepSeek's class name")
    right = load_tokenizer(folder)
    assert right.tokenize("a 12 b") == ["a", "Ġ12", "Ġb"]
    assert pickle.loads(pickle.dumps(right)).tokenize("a 12 b") == right.tokenize("a 12 b")
    options = {"trust_remote_code": False, "temp_dir": Path(tempfile.gettempdir())}
    with model_files(str(folder), tokenizer_name=None, **options) as files:
        of_vllm = AutoTokenizer.from_pretrained(files.tokenizer_path)
        assert of_vllm("a 12 b")["input_ids"] == right("a 12 b")["input_ids"]
        assert of_vllm.chat_template == right.chat_template
    other = make(tmp_path / "other", "untied")
    with model_files(str(other), tokenizer_name=None, **options) as files:
        assert files.tokenizer_path == str(other)
