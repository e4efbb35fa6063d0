"""An untrained Llama of one to two million parameters, and a tokenizer made for the texts of one task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Steps
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, END = "<pad>", "<end>"
ROLES = {"system": "<system>", "user": "<user>", "assistant": "<assistant>", "tool": "<tool>"}
CHAT_TEMPLATE = (
    "{% if tools %}<system>"
    "{% for tool in tools %}{{ tool.function.name + ': ' + tool.function.description }}{% endfor %}<end>{% endif %}"
    "{% for message in messages %}{{ '<' + message.role + '>' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Each message between the token of its role and `<end>`; calls as in Hermes. Functions are shown by name and description."""


def make_tokenizer(
    texts: Iterable[str], *, vocabulary: int, spelled: str = r"\d", whole: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on these texts.

    Args:
        texts: Texts of the task.
        vocabulary: Number of tokens, at least 300, without those of `whole`.
        spelled: Regular expression of what is one token per match, such as a digit.
        whole: Texts that are one token each, such as an instruction that all prompts repeat.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Steps(  # type: ignore[assignment]
        [Split(Regex(spelled), "isolated"), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = ByteLevelDecoder()  # type: ignore[assignment]
    special = [PAD, END, *ROLES.values()]
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(token, special=True) for token in special],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in whole])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=list(ROLES.values()),
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def write_untrained_model(folder: Path, tokenizer: PreTrainedTokenizerFast, *, hidden: int, layers: int) -> int:
    """Write a model with random weights and its tokenizer, and return the number of parameters."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 32,
            num_key_value_heads=hidden // 32,
            initializer_range=hidden**-0.5,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())
