"""Loss masks of whole conversations, compared with hand-written segments for each style of chat template.

The reference shares nothing with the code: a few lines of Python say, for each style, which characters of a conversation a
model would sample; a token is trained where its characters are (by the tokenizer's own offsets). Masks are 0 or 1, so that the
comparison is exact.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from template_styles import Segments, Style, expected, tokenizer_of, trained_text
from transformers import PreTrainedTokenizerFast

from rl_core.errors import DataError
from rl_train.data.processors import conversation_datum, preference_datum, prompt_datum


def chatml(log: list[dict]) -> Segments:
    segments: Segments = []
    for message in log:
        is_answer = message["role"] == "assistant"
        segments += [
            (f"<|im_start|>{message['role']}\n", False),
            (f"{message['content']}<|im_end|>", is_answer),
            ("\n", False),
        ]
    return segments


def llama(log: list[dict]) -> Segments:
    segments: Segments = [("<|begin_of_text|>", False)]
    for message in log:
        segments += [
            (f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n", False),
            (f"{message['content'].strip()}<|eot_id|>", message["role"] == "assistant"),
        ]
    return segments


def mistral(log: list[dict]) -> Segments:
    segments: Segments = [("<s>", False)]
    system = log[0]["content"] + "\n\n" if log[0]["role"] == "system" else ""
    for message in log[1:] if system else log:
        if message["role"] == "user":
            segments.append((f"[INST] {system}{message['content']} [/INST]", False))
            system = ""
        else:
            segments.append((f" {message['content']}</s>", True))
    return segments


def gemma(log: list[dict]) -> Segments:
    segments: Segments = [("<bos>", False)]
    system = log[0]["content"].strip() + "\n\n" if log[0]["role"] == "system" else ""
    for message in log[1:] if system else log:
        is_answer = message["role"] == "assistant"
        role = "model" if is_answer else "user"
        prefix, system = (system, "") if not is_answer else ("", system)
        segments += [
            (f"<start_of_turn>{role}\n", False),
            (f"{prefix}{message['content'].strip()}<end_of_turn>", is_answer),
            ("\n", False),
        ]
    return segments


STYLES = {
    "chatml": Style(
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ("<|im_start|>", "<|im_end|>"),
        chatml,
    ),
    "llama": Style(
        "{{ '<|begin_of_text|>' }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' "
        "+ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        llama,
    ),
    "mistral": Style(
        "{{ '<s>' }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}"
        "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
        "{% for m in turns %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
        "{% if m['role'] == 'user' %}{{ '[INST] ' + (system if loop.first else '') + m['content'] + ' [/INST]' }}"
        "{% else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}",
        ("<s>", "</s>", "[INST]", "[/INST]"),
        mistral,
    ),
    "gemma": Style(
        "{{ '<bos>' }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] | trim + '\n\n' %}"
        "{% set turns = messages[1:] %}{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}"
        "{% for m in turns %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
        "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else 'user') + '\n' "
        "+ (first if loop.first else '') + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        gemma,
    ),
}

# Drops the reasoning of every answer but the last one, as the templates of several reasoning models do.
FORGETFUL = (
    "{% for m in messages %}{% set text = m['content'] %}{% if m['role'] == 'assistant' and not loop.last %}"
    "{% set text = text.split('</think>')[-1] %}{% endif %}<|im_start|>{{ m['role'] }}\n{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    return {name: tokenizer_of(style) for name, style in STYLES.items()}


# White space at the ends is what some templates strip; at a beginning it merges with the header, which has a separate test.
WORDS = st.text("abc def?\n", max_size=12).map(str.strip).filter(bool)
ENDS = st.sampled_from(["", " ", "\n"])


@st.composite
def conversations(draw) -> list[dict]:
    log = [{"role": "system", "content": draw(WORDS)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        log.append({"role": "user", "content": draw(WORDS) + draw(ENDS)})
        log.append({"role": "assistant", "content": draw(WORDS) + draw(ENDS)})
    return log


@pytest.mark.parametrize("name", STYLES)
@given(log=conversations())
@settings(max_examples=40)
def test_trained_tokens_equal_the_tokens_sampled_turn_by_turn(tokenizers, name, log):
    tokenizer = tokenizers[name]
    datum = conversation_datum({"messages": log}, idx=0, tokenizer=tokenizer)
    ids = torch.cat([message["token_ids"] for message in datum["message_log"]]).tolist()
    mask = torch.cat([message["token_loss_mask"] for message in datum["message_log"]]).tolist()
    assert (ids, mask) == expected(STYLES[name].by_hand(log), tokenizer)
    assert ids == tokenizer.apply_chat_template(log, return_dict=False)


@pytest.mark.parametrize("name", STYLES)
def test_the_loss_mask_is_correct_for_last_answers_zero_weights_and_pairs(tokenizers, name):
    log = [
        {"role": "user", "content": "six"},
        {"role": "assistant", "content": "seven"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "forty"},
    ]
    segments = STYLES[name].by_hand(log)
    last = max(number for number, (_, is_sampled) in enumerate(segments) if is_sampled)
    wanted = expected([(text, number == last) for number, (text, _) in enumerate(segments)], tokenizers[name])[1]

    def mask_of(message_log):
        return torch.cat([message["token_loss_mask"] for message in message_log]).tolist()

    final = conversation_datum({"messages": log}, idx=0, tokenizer=tokenizers[name], only_unmask_final=True)
    assert mask_of(final["message_log"]) == wanted
    weighed = [log[0], {**log[1], "weight": 0}, log[2], {**log[3], "weight": 1}]
    assert mask_of(conversation_datum({"messages": weighed}, idx=0, tokenizer=tokenizers[name])["message_log"]) == wanted
    pair = {"prompt": log[:3], "chosen": log[3:], "rejected": [{"role": "assistant", "content": "five"}]}
    assert mask_of(preference_datum(pair, idx=0, tokenizer=tokenizers[name])["message_log_chosen"]) == wanted


def test_training_on_reasoning_that_the_template_drops_is_an_error_with_a_fix():
    tokenizer = tokenizer_of(STYLES["chatml"])
    tokenizer.chat_template = FORGETFUL
    first = [{"role": "user", "content": "six"}, {"role": "assistant", "content": "so</think>seven"}]
    assert conversation_datum({"messages": first}, idx=0, tokenizer=tokenizer)["length"] > 0
    second = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "as</think>forty"}]
    twice = {"messages": [*first, *second]}
    with pytest.raises(DataError, match=r"leaves out its content of message 1 .*reasoning of earlier.*only_unmask_final"):
        conversation_datum(twice, idx=0, tokenizer=tokenizer)
    last = conversation_datum(twice, idx=0, tokenizer=tokenizer, only_unmask_final=True)
    assert trained_text(last, tokenizer) == ["as</think>forty<|im_end|>"]


def test_roles_that_do_not_alternate_are_errors_with_the_message_of_the_template(tokenizers):
    log = [{"role": "user", "content": "six"}, {"role": "user", "content": "seven"}, {"role": "assistant", "content": "two"}]
    with pytest.raises(DataError, match="roles must alternate"):
        conversation_datum({"messages": log}, idx=0, tokenizer=tokenizers["mistral"])


def test_an_answer_that_begins_with_white_space_follows_the_tokens_of_its_prompt(tokenizers):
    log = [{"role": "user", "content": "six"}, {"role": "assistant", "content": "\nseven"}]
    tokenizer = tokenizers["chatml"]
    assert len(tokenizer("\n\n")["input_ids"]) == 1, "the test needs a tokenizer that merges line breaks"
    datum = conversation_datum({"messages": log}, idx=0, tokenizer=tokenizer)
    prompt = prompt_datum({"messages": log[:1]}, idx=0, tokenizer=tokenizer)
    ids, asked = (torch.cat([m["token_ids"] for m in row["message_log"]]).tolist() for row in (datum, prompt))
    assert ids[: len(asked)] == asked
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(log, tokenize=False)
    assert trained_text(datum, tokenizer) == ["\nseven<|im_end|>"]


def test_tokens_of_a_question_are_never_trained_even_if_it_cannot_be_rendered_separately(tokenizers):
    tokenizer = tokenizer_of(STYLES["chatml"])
    needs_answer = "{% if messages[-1]['role'] != 'assistant' %}{{ raise_exception('no answer') }}{% endif %}"
    tokenizer.chat_template = needs_answer + tokenizer.chat_template
    log = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert trained_text(conversation_datum({"messages": log}, idx=0, tokenizer=tokenizer), tokenizer) == ["b<|im_end|>"]
    with pytest.raises(DataError, match="no answer"):
        prompt_datum({"messages": log[:1]}, idx=0, tokenizer=tokenizer)


def test_answers_without_any_token_to_train_on_are_refused(tokenizers):
    log = [{"role": "user", "content": "six"}, {"role": "assistant", "content": "seven", "weight": 0}]
    with pytest.raises(DataError, match="no token to train on"):
        conversation_datum({"messages": log}, idx=0, tokenizer=tokenizers["llama"])
