"""Model folders in the forms in which people publish models: a tiny Llama, with a tokenizer made here.

`make(folder, form)` writes one of `FORMS`. The files are those of a published model, not those that Transformers would write
after it has read them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL = ("<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>")
"""The first ids of every tokenizer."""
UNK, BOS, EOS, PAD, START, END = range(len(SPECIAL))
WEIGHTS = "model.safetensors"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXTS = (
    "What is 12 + 34? The answer is 46.",
    "user assistant system the sum of two numbers, 1234567890 + - * / = ? a 12 b",
    "Once upon a time there was a small model that learned to add.",
)
_SIZE = 320


def byte_level(*, start: bool = False) -> Tokenizer:
    """A byte-level BPE of 320 tokens, as GPT-2, Llama 3 and Qwen have it.

    Args:
        start: whether its post-processor adds the start token `<s>`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_SIZE, special_tokens=list(SPECIAL), initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return _with_start(tokenizer) if start else tokenizer


def unigram() -> Tokenizer:
    """A Unigram tokenizer that marks spaces with `▁`, as SentencePiece has it; its post-processor adds the start token."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    letters = sorted({*"▁", *"".join(_TEXTS), *map(chr, range(33, 127))} - {" "})
    trainer = trainers.UnigramTrainer(
        vocab_size=_SIZE, special_tokens=list(SPECIAL), initial_alphabet=letters, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return _with_start(tokenizer)


def _with_start(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer | None = None, **settings: Any) -> None:
    """Write the tokenizer (`byte_level` by default) and its config.

    Args:
        folder: exists.
        tokenizer: becomes `tokenizer.json`.
        **settings: replace values of `tokenizer_config.json`; None removes one.
    """
    (tokenizer or byte_level()).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 128,
        "chat_template": TEMPLATE,
        **settings,
    }
    _write(folder / "tokenizer_config.json", {key: value for key, value in config.items() if value is not None})


def write_model(folder: Path, **fields: Any) -> LlamaForCausalLM:
    """Write config, generation config and weights of a random Llama with 2 layers; vLLM on a CPU can load it too.

    Args:
        folder: exists.
        **fields: replace fields of the config.
    """
    config = LlamaConfig(
        **{
            "vocab_size": _SIZE,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "max_position_embeddings": 128,
            "initializer_range": 0.1,
            "bos_token_id": BOS,
            "eos_token_id": END,
            "pad_token_id": PAD,
            "tie_word_embeddings": False,
            **fields,
        }
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model


def edit_json(path: Path, **fields: Any) -> None:
    """Replace fields of a JSON file; None removes one."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    _write(path, {key: value for key, value in {**content, **fields}.items() if value is not None})


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Apply `edit` to the tensors of `model.safetensors`, by name."""
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})


def _plain(folder: Path) -> None:
    write_model(folder)
    write_tokenizer(folder)


def _tied(folder: Path) -> None:
    write_model(folder, tie_word_embeddings=True)
    write_tokenizer(folder)


def _tied_with_both_tensors(folder: Path) -> None:
    _tied(folder)
    edit_weights(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))


def _sharded(folder: Path) -> None:
    _plain(folder)
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    files = {name: f"model-{1 + number % 2:05d}-of-00002.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        own = {name: tensors[name] for name in tensors if files[name] == file}
        save_file(own, folder / file, metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    _write(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": files})


def _bin(folder: Path) -> None:
    _plain(folder)
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def _padded_vocabulary(folder: Path) -> None:
    write_model(folder, vocab_size=_SIZE + 64)
    write_tokenizer(folder)


def _extra_tensors(folder: Path) -> None:
    """A layer for predicting several tokens, and rotary frequencies, which old versions of Transformers saved."""
    _plain(folder)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        layer = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.1.")}
        tensors |= {name.replace("layers.1", "layers.2"): tensor.clone() for name, tensor in layer.items()}
        tensors |= {f"model.layers.{number}.self_attn.rotary_emb.inv_freq": torch.ones(16) for number in range(2)}

    edit_weights(folder, add)


def _no_generation_config(folder: Path) -> None:
    _plain(folder)
    (folder / "generation_config.json").unlink()


def _llama_2_generation_config(folder: Path) -> None:
    _plain(folder)
    fields = {"temperature": 0.9, "top_p": 0.6, "max_length": 4096}
    edit_json(folder / "generation_config.json", bos_token_id=BOS, eos_token_id=END, pad_token_id=PAD, **fields)


def _invalid_generation_config(folder: Path) -> None:
    _plain(folder)
    edit_json(folder / "generation_config.json", do_sample=False, num_return_sequences=4)


def _deepseek_class_name(folder: Path) -> None:
    write_model(folder, eos_token_id=EOS)
    write_tokenizer(folder, byte_level(start=True), tokenizer_class="LlamaTokenizerFast", eos_token="</s>", legacy=True)


def _custom_class_name(folder: Path) -> None:
    _plain(folder)
    edit_json(folder / "config.json", architectures=["AcmeForCausalLM"])
    edit_json(folder / "tokenizer_config.json", tokenizer_class="AcmeTokenizer")


def _left_padding(folder: Path) -> None:
    write_model(folder)
    write_tokenizer(folder, padding_side="left")


def _no_pad_token(folder: Path) -> None:
    write_model(folder, pad_token_id=None)
    write_tokenizer(folder, pad_token=None)


def _added_tokens(folder: Path) -> None:
    """Two special tokens and a word, added after training; the embedding has rows for them."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<answer>", "</answer>"])
    tokenizer.add_tokens(["Zaphod"])
    write_model(folder, vocab_size=tokenizer.get_vocab_size())
    write_tokenizer(folder, tokenizer, extra_special_tokens=["<answer>", "</answer>"])


def _start_token(folder: Path) -> None:
    write_model(folder)
    write_tokenizer(folder, unigram(), clean_up_tokenization_spaces=True)


FORMS: Mapping[str, Callable[[Path], None]] = {
    "untied": _plain,
    "tied": _tied,
    "tied with both tensors": _tied_with_both_tensors,
    "sharded": _sharded,
    "bin": _bin,
    "padded vocabulary": _padded_vocabulary,
    "extra tensors": _extra_tensors,
    "no generation config": _no_generation_config,
    "Llama 2's generation config": _llama_2_generation_config,
    "invalid generation config": _invalid_generation_config,
    "DeepSeek's class name": _deepseek_class_name,
    "custom class name": _custom_class_name,
    "left padding": _left_padding,
    "no pad token": _no_pad_token,
    "added tokens": _added_tokens,
    "start token": _start_token,
}
"""Name of each form to what writes it."""


def make(folder: Path, form: str = "untied") -> Path:
    """Write a model folder.

    Args:
        folder: created.
        form: one of `FORMS`.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True)
    FORMS[form](folder)
    return folder


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
