"""A tiny random model with its tokenizer, and the expected engine output, by plain forward passes and plain decoding."""

import math
import random
import string

import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rl_core.data.batched_data_dict import BatchedDataDict

VOCABULARY, LENGTH, EOS = 512, 2560, 1


def make_readable_model(folder, *, chat_template=None):
    """A Llama in which all tokens except two are ASCII text."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # vLLM's attention on a CPU takes 32, 64, ...
        max_position_embeddings=LENGTH,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
        # Wide enough that log-probabilities differ by whole nats, so that errors are visible.
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[EOS] = -model.lm_head.weight[EOS].abs()
    model.save_pretrained(folder)
    tokenizer = _tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return str(folder)


def _tokenizer():
    words = random.Random(5)
    text = [" ".join("".join(words.choices(string.ascii_lowercase, k=words.randint(2, 7))) for _ in range(4000))]
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<pad>", "<eos>"], show_progress=False)
    core.train_from_iterator(text, trainer)
    assert core.get_vocab_size() == VOCABULARY
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")


def batch_of(*prompts, **columns):
    width = max(map(len, prompts))
    return BatchedDataDict(
        input_ids=torch.tensor([list(prompt) + [0] * (width - len(prompt)) for prompt in prompts]),
        input_lengths=torch.tensor([len(prompt) for prompt in prompts]),
        **columns,
    )


def random_batch(rows=8, longest=20, *, seed=0, **columns):
    """Prompts of unequal lengths, with different seeds."""
    numbers = random.Random(seed)
    prompts = [[numbers.randrange(2, VOCABULARY) for _ in range(numbers.randint(1, longest))] for _ in range(rows)]
    return batch_of(*prompts, **{"sample_seeds": torch.arange(rows) * 7 + 1000 * seed, **columns})


def rows_of(output):
    """Each row's prompt length, tokens and their log-probabilities, without padding."""
    for row in range(output.size):
        length, sampled = int(output["unpadded_sequence_lengths"][row]), int(output["generation_lengths"][row])
        yield length - sampled, output["output_ids"][row, :length], output["logprobs"][row, length - sampled : length]


def completions(output):
    return [tokens[prompt:].tolist() for prompt, tokens, _ in rows_of(output)]


def plain_scores(model, tokens, *, temperature):
    """Log-probabilities of every token after the first, one row at a time."""
    with torch.no_grad():
        logits = model(tokens[None], use_cache=False).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def expected_logprobs(model, output, *, temperature):
    """Log-probabilities of the completions of all rows, concatenated."""
    return torch.cat([plain_scores(model, t, temperature=temperature)[p - 1 :] for p, t, _ in rows_of(output)])


def found_logprobs(output):
    return torch.cat([logprobs for _, _, logprobs in rows_of(output)])


def filtered_logprob(logits, token, *, temperature, top_k, top_p):
    """Log-probability of one token after top-k, then top-p, by definition, in float64; None if it is filtered out."""
    scores = [float(x) / temperature for x in logits]
    kept = sorted(range(len(scores)), key=lambda i: -scores[i])[:top_k]
    weights = {i: math.exp(scores[i] - scores[kept[0]]) for i in kept}
    total, reached, nucleus = sum(weights.values()), 0.0, []
    for i in kept:
        if reached >= top_p * total:
            break
        nucleus.append(i)
        reached += weights[i]
    return math.log(weights[token] / reached) if token in nucleus else None


def first_stop(tokenizer, tokens, strings):
    """Number of tokens until one of the strings is in their text, decoded from scratch each time: slow but clearly correct."""
    for count in range(1, len(tokens) + 1):
        if any(string in tokenizer.decode(tokens[:count]) for string in strings):
            return count
    return None
