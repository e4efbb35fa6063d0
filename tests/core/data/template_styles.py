"""Chat templates with the same format written by hand: the text, and which parts a model would sample."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Segments = list[tuple[str, bool]]


@dataclass(frozen=True)
class Style:
    """A chat template, its special tokens, and hand-written segments, each with whether a model samples it."""

    template: str
    special: tuple[str, ...]
    by_hand: Callable[..., Segments]


# The pre-tokenizer of most current models: consecutive line breaks stay together.
WORDS_OF_LLAMA_3 = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def tokenizer_of(style: Style) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(WORDS_OF_LLAMA_3, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|pad|>", *style.special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["the answer is forty two and the question is what is six times seven\n\n"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<|pad|>", eos_token=style.special[-1])
    tokenizer.add_special_tokens({"additional_special_tokens": list(style.special)})
    tokenizer.chat_template = style.template
    return tokenizer


def expected(segments: Segments, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[float]]:
    """Token ids of the whole text, and 1 where a token's characters are sampled."""
    text = "".join(part for part, _ in segments)
    sampled = [is_sampled for part, is_sampled in segments for _ in part]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], [float(all(sampled[start:end])) for start, end in encoded["offset_mapping"]]


def trained_text(datum: dict, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The texts of the ranges of tokens that a row trains."""
    ids = torch.cat([message["token_ids"] for message in datum["message_log"]]).tolist()
    mask = torch.cat([message["token_loss_mask"] for message in datum["message_log"]]).tolist()
    runs: list[list[int]] = [[]]
    for token, is_trained in zip(ids, mask, strict=True):
        if is_trained:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]
