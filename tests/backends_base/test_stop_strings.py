import types

import pytest
import tokenizers
import transformers

from rl_backends_base.rows import StopStringScanner
from rl_core.data.generation_io import end_token_ids

TEXT = "the sum of two numbers is a number. 12 + 30 = 42. Zażółć gęślą jaźń — ответ: 42. こんにちは 🙂 naïve café. \n\n" * 3


@pytest.fixture(scope="module")
def tokenizer():
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([TEXT], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")


def tokens_until_stop(tokenizer, strings, tokens, prompt=()):
    scanner = StopStringScanner(tokenizer, strings, list(prompt))
    return next((count for count, token in enumerate(tokens, 1) if scanner.push(token)), None)


@pytest.mark.parametrize(
    "text", ["12 + 30 = 42. the sum", "ответ: 42. こんにちは 🙂 and more", "naïve café 🙂🙂 — 日本語\n\n", "plain text " * 40]
)
def test_a_string_is_found_at_the_first_token_that_completes_it_wherever_boundaries_fall(tokenizer, text):
    tokens = tokenizer.encode(text)
    for start in range(0, len(text), max(1, len(text) // 12)):
        for length in (1, 2, 5, 11):
            string = text[start : start + length]
            # Decoded from scratch each time: slow but clearly correct.
            first = next(n for n in range(1, len(tokens) + 1) if string in tokenizer.decode(tokens[:n]))
            assert tokens_until_stop(tokenizer, [string], tokens) == first


def test_single_byte_tokens_form_the_characters_of_a_stop_string(tokenizer):
    tokens = [token_of_byte(tokenizer, byte) for byte in "a🙂b".encode()]
    assert tokens_until_stop(tokenizer, ["🙂"], tokens) == 5
    assert tokens_until_stop(tokenizer, ["a🙂b"], tokens) == 6
    assert tokens_until_stop(tokenizer, ["a"], tokens) == 1


def token_of_byte(tokenizer, byte):
    """Byte-level BPE writes printable bytes as themselves and the others, in order, as the characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    return tokenizer.convert_tokens_to_ids(chr(byte if byte in printable else 256 + others.index(byte)))


def test_invalid_bytes_do_not_hide_a_later_stop_string(tokenizer):
    broken = [token_of_byte(tokenizer, 0x9F)] * 30
    tokens = [*broken, *tokenizer.encode("the end")]
    assert tokens_until_stop(tokenizer, ["end"], tokens) == len(tokens)


def test_the_text_of_the_prompt_does_not_count(tokenizer):
    prompt, completion = tokenizer.encode("the answer"), tokenizer.encode(" is 42.")
    assert tokens_until_stop(tokenizer, ["answer"], completion, prompt) is None
    assert tokens_until_stop(tokenizer, ["er is"], completion, prompt) is None
    assert tokens_until_stop(tokenizer, [" is 4"], completion, prompt) is not None


def test_a_special_token_s_own_text_can_be_a_stop_string(tokenizer):
    tokens = [*tokenizer.encode("sum"), tokenizer.eos_token_id]
    assert tokens_until_stop(tokenizer, ["<eos>"], tokens) == len(tokens)


def test_each_token_is_decoded_with_a_bounded_window(tokenizer):
    longest = 0

    class Counting:
        def decode(self, tokens, **kwargs):
            nonlocal longest
            longest = max(longest, len(tokens))
            return tokenizer.decode(tokens, **kwargs)

    scanner = StopStringScanner(Counting(), ["never there"], tokenizer.encode("a prompt " * 50))
    assert not any(scanner.push(token) for token in tokenizer.encode(TEXT * 4))
    assert longest < 40


def test_end_tokens_come_from_every_source():
    config, nothing = types.SimpleNamespace(eos_token_id=[3, 4]), types.SimpleNamespace(eos_token_id=None)
    assert end_token_ids(config, nothing, None, types.SimpleNamespace(eos_token_id=0), further=[9]) == {0, 3, 4, 9}
