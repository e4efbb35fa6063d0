"""Templates that rewrite earlier turns: prompts are rendered as a whole, and only sampled tokens are trained.

Each template here is small and has one habit of published ones. Next to it is the same by hand: texts, and which of them a
model samples. Masks are 0 or 1, so that the comparison is exact.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from template_styles import CHATML, Segments, Style, expected, tokenizer_of, trained_text

from rl_core.errors import DataError
from rl_train.data.messages import add_loss_mask_to_message_log, get_formatted_message_log
from rl_train.data.processors import conversation_datum, preference_datum, prompt_datum

IM = ("<|im_start|>", "<think>", "</think>", "<|end|>", "<|im_end|>")
ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
EACH = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"


def by_hand(answer):
    """ChatML with answers as `answer(content, is_last)` gives them: segments after the header."""

    def made(log: list[dict]) -> Segments:
        segments: Segments = []
        for number, message in enumerate(log):
            segments.append((f"<|im_start|>{message['role']}\n", False))
            if message["role"] == "assistant":
                segments += answer(message["content"], number + 1 == len(log))
            else:
                segments += [(f"{message['content']}<|im_end|>\n", False)]
        return segments

    return made


def style(before: str, after: str, header: str, answer) -> Style:
    """A template that writes `before` and `after` around the content of an answer."""
    body = (
        f"{{% if m['role'] == 'assistant' %}}{before}{{{{ m['content'] }}}}{after}"
        "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    )
    return Style(EACH + body + header, IM, by_hand(answer))


STYLES = {
    # The last answer has empty reasoning, which earlier ones lose.
    "drops empty reasoning": style(
        "{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}",
        "{{ '<|im_end|>\n' }}",
        ASKS,
        lambda text, last: [(("<think>\n\n</think>\n\n" if last else "") + text + "<|im_end|>", True), ("\n", False)],
    ),
    # The prompt opens the reasoning, the conversation does not.
    "opens reasoning": style(
        "",
        "{{ '<|im_end|>\n' }}",
        ASKS.replace("assistant\n", "assistant\n<think>"),
        lambda text, last: [(text + "<|im_end|>", True), ("\n", False)],
    ),
    # The token that ends an answer is another one once messages follow; it was never sampled there.
    "replaces the end": style(
        "",
        "{{ '<|im_end|>\n' if loop.last else '<|end|>\n' }}",
        ASKS,
        lambda text, last: [(text, True), ("<|im_end|>" if last else "<|end|>", last), ("\n", False)],
    ),
    # The generation prompt follows every conversation, requested or not.
    "always asks": style(
        "",
        "{{ '<|im_end|>\n' }}",
        "{{ '<|im_start|>assistant\n' }}",
        lambda text, last: [(text + "<|im_end|>", True), ("\n" + ("<|im_start|>assistant\n" if last else ""), False)],
    ),
    # The same, and the end of an answer is a token that the tokenizer does not call its end of sequence.
    "always asks, unknown end": style(
        "",
        "{{ '<|end|>\n' }}",
        "{{ '<|im_start|>assistant\n' }}",
        lambda text, last: [(text + "<|end|>", True), ("\n" + ("<|im_start|>assistant\n" if last else ""), False)],
    ),
    # More special tokens after the end of the last answer.
    "closes the text": style(
        "",
        "{{ '<|im_end|>\n' }}{% if loop.last %}{{ '<|end|>' }}{% endif %}",
        ASKS,
        lambda text, last: [(text + "<|im_end|>", True), ("\n" + ("<|end|>" if last else ""), False)],
    ),
}


@pytest.fixture(scope="module")
def tokenizers():
    return {name: tokenizer_of(style) for name, style in STYLES.items()}


WORDS = st.text("abc def?\n", min_size=1, max_size=12).map(str.strip).filter(bool)


@st.composite
def conversations(draw) -> list[dict]:
    log = [{"role": "system", "content": draw(WORDS)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        log += [{"role": "user", "content": draw(WORDS)}, {"role": "assistant", "content": draw(WORDS)}]
    return log


def tokens_of(log: list[dict]) -> list[int]:
    return torch.cat([message["token_ids"] for message in log]).tolist()


def mask_of(log: list[dict]) -> list[float]:
    return torch.cat([message["token_loss_mask"] for message in log]).tolist()


@pytest.mark.parametrize("name", STYLES)
@given(log=conversations())
@settings(max_examples=25)
def test_every_answer_is_found_in_the_whole_text_and_nothing_else_is_trained(tokenizers, name, log):
    tokenizer = tokenizers[name]
    datum = conversation_datum({"messages": log}, idx=0, tokenizer=tokenizer)
    wanted = expected(STYLES[name].by_hand(log), tokenizer)
    assert (tokens_of(datum["message_log"]), mask_of(datum["message_log"])) == wanted


@pytest.mark.parametrize("name", STYLES)
@given(log=conversations())
@settings(max_examples=10)
def test_a_prompt_with_earlier_answers_is_rendered_as_a_whole(tokenizers, name, log):
    tokenizer = tokenizers[name]
    prompt = prompt_datum({"messages": log[:-1]}, idx=0, tokenizer=tokenizer)
    whole = tokenizer.apply_chat_template(log[:-1], add_generation_prompt=True, return_dict=False)
    assert tokens_of(prompt["message_log"]) == whole
    assert prompt["length"] == len(whole)


@pytest.mark.parametrize("name", STYLES)
def test_last_answer_masks_and_pairs_work_with_rewriting_templates(tokenizers, name):
    asked = [{"role": "user", "content": "six"}, {"role": "assistant", "content": "seven"}, {"role": "user", "content": "two"}]
    log = [*asked, {"role": "assistant", "content": "forty"}]
    segments = STYLES[name].by_hand(log)
    end = len(segments) - next(
        n for n, (text, _) in enumerate(reversed(segments)) if "assistant\n" in text and "forty" not in text
    )
    if name.startswith("always asks"):
        end = next(n for n, (text, _) in enumerate(segments) if "forty" in text)
    wanted = expected([(text, sampled and n >= end) for n, (text, sampled) in enumerate(segments)], tokenizers[name])
    final = conversation_datum({"messages": log}, idx=0, tokenizer=tokenizers[name], only_unmask_final=True)
    assert (tokens_of(final["message_log"]), mask_of(final["message_log"])) == wanted
    pair = {"prompt": asked, "chosen": log[3:], "rejected": [{"role": "assistant", "content": "five"}]}
    made = preference_datum(pair, idx=0, tokenizer=tokenizers[name])["message_log_chosen"]
    assert (tokens_of(made), mask_of(made)) == wanted


# Drops all reasoning, and opens it in the prompt.
STRIPS = STYLES["opens reasoning"].template.replace(
    "m['content'] }}{{ '<|im_end|>\n' }}", "m['content'].split('</think>')[-1] }}{{ '<|im_end|>\n' }}"
)


@pytest.mark.parametrize("written", ["<think>so</think>seven", "so</think>seven"])
def test_reasoning_that_the_prompt_opens_and_the_template_strips_follows_the_prompt(written):
    tokenizer = tokenizer_of(Style(STRIPS, IM, by_hand(None)))
    log = [{"role": "user", "content": "six"}, {"role": "assistant", "content": written}]
    datum = conversation_datum({"messages": log}, idx=0, tokenizer=tokenizer)
    prompt = "<|im_start|>user\nsix<|im_end|>\n<|im_start|>assistant\n<think>"
    wanted = expected([(prompt, False), ("so</think>seven<|im_end|>", True), ("\n", False)], tokenizer)
    assert (tokens_of(datum["message_log"]), mask_of(datum["message_log"])) == wanted
    with pytest.raises(DataError, match="leaves out its content of message 1"):
        conversation_datum({"messages": [*log, *log]}, idx=0, tokenizer=tokenizer)


def test_reasoning_fields_that_only_the_last_answer_keeps_are_not_lost_silently():
    keeps = "{% if loop.last and m['reasoning_content'] %}{{ '<think>' + m['reasoning_content'] + '</think>' }}{% endif %}"
    tokenizer = tokenizer_of(style(keeps, "{{ '<|im_end|>\n' }}", ASKS, None))
    answer = {"role": "assistant", "content": "seven", "reasoning_content": "so"}
    log = [{"role": "user", "content": "six"}, answer]
    one = conversation_datum({"messages": log}, idx=0, tokenizer=tokenizer)
    assert trained_text(one, tokenizer) == ["<think>so</think>seven<|im_end|>"]
    with pytest.raises(DataError, match=r"leaves out `reasoning_content` of message 1"):
        conversation_datum({"messages": [*log, *log]}, idx=0, tokenizer=tokenizer)
    last = conversation_datum({"messages": [*log, *log]}, idx=0, tokenizer=tokenizer, only_unmask_final=True)
    assert trained_text(last, tokenizer) == ["<think>so</think>seven<|im_end|>"]


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "clock", "arguments": {"city": "Bern"}}}]}
RESULT = {"role": "tool", "content": "three"}
# The prompt has the header only after a question, the conversation after results too; calls drop empty reasoning.
AFTER_RESULTS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > messages | length - 3 %}{{ '<think></think>' }}{% endif %}{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ '<call>' + c['function']['name'] }}{{ c['function']['arguments'] | tojson }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1]['role'] != 'tool' %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_header_that_only_a_conversation_has_after_a_result_is_not_trained():
    template = AFTER_RESULTS.replace("{{ '<think></think>' }}", "")
    tokenizer = tokenizer_of(Style(template, IM, by_hand(None)))
    log = [{"role": "user", "content": "late?"}, CALL, RESULT, {"role": "assistant", "content": "yes"}]
    datum = conversation_datum({"messages": log}, idx=0, tokenizer=tokenizer)
    assert trained_text(datum, tokenizer) == ['<call>clock{"city": "Bern"}<|im_end|>', "yes<|im_end|>"]


def test_calls_are_found_in_a_template_that_rewrites_them_once_an_answer_follows():
    tokenizer = tokenizer_of(Style(AFTER_RESULTS.replace(" and messages[-1]['role'] != 'tool'", ""), IM, by_hand(None)))
    log = [{"role": "user", "content": "late?"}, CALL, RESULT, {"role": "assistant", "content": "yes"}]
    datum = conversation_datum({"messages": log}, idx=0, tokenizer=tokenizer)
    assert tokenizer.decode(tokens_of(datum["message_log"])) == tokenizer.apply_chat_template(log, tokenize=False)
    assert trained_text(datum, tokenizer) == ['<call>clock{"city": "Bern"}<|im_end|>', "<think></think>yes<|im_end|>"]


def test_a_system_message_that_the_template_writes_only_into_the_last_question_is_in_the_row():
    template = (
        "{% set s = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}{% for m in messages %}"
        "{% if m['role'] == 'user' %}{{ '<|im_start|>' }}{% if loop.last %}{{ s + '\n' }}{% endif %}"
        "{{ m['content'] + '<|end|>' }}"
        "{% elif m['role'] == 'assistant' %}{{ m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
    )
    tokenizer = tokenizer_of(Style(template, IM, by_hand(None)))
    log = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "six"}, {"role": "assistant", "content": "no"}]
    datum = conversation_datum({"messages": log}, idx=0, tokenizer=tokenizer)
    assert tokenizer.decode(tokens_of(datum["message_log"])) == "<|im_start|>be kind\nsix<|end|>no<|im_end|>"
    assert trained_text(datum, tokenizer) == ["no<|im_end|>"]


@pytest.mark.parametrize("space", [" ", "\n", "\n\n", " \n "])
def test_answers_that_begin_with_white_space_continue_their_prompts_in_every_turn(space):
    tokenizer = tokenizer_of(Style(CHATML, IM, by_hand(None)))
    log = [message for word in ("seven", "two") for message in (
        {"role": "user", "content": "six"}, {"role": "assistant", "content": space + word})]  # fmt: skip
    datum = conversation_datum({"messages": log}, idx=0, tokenizer=tokenizer)
    assert tokenizer.decode(tokens_of(datum["message_log"])) == tokenizer.apply_chat_template(log, tokenize=False)
    assert trained_text(datum, tokenizer) == [f"{space}seven<|im_end|>", f"{space}two<|im_end|>"]
    first = prompt_datum({"messages": log[:1]}, idx=0, tokenizer=tokenizer)["message_log"]
    assert tokens_of(datum["message_log"])[: len(tokens_of(first))] == tokens_of(first)


def test_the_header_of_an_answer_after_an_answer_or_at_the_beginning_is_not_trained():
    tokenizer = tokenizer_of(Style(CHATML, IM, by_hand(None)))
    log = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "six"}]
    log += [{"role": "assistant", "content": "seven"}, {"role": "assistant", "content": "two"}]
    datum = conversation_datum({"messages": log}, idx=0, tokenizer=tokenizer)
    assert trained_text(datum, tokenizer) == ["hello<|im_end|>", "seven<|im_end|>", "two<|im_end|>"]
    formatted = get_formatted_message_log(log[:3], tokenizer, add_generation_prompt=True)
    add_loss_mask_to_message_log([formatted], tokenizer=tokenizer)
    assert trained_text({"message_log": formatted}, tokenizer) == ["hello<|im_end|>", "seven<|im_end|>"]


def test_messages_of_the_user_are_trained_with_all_that_they_add():
    tokenizer = tokenizer_of(Style(CHATML, IM, by_hand(None)))
    log = [{"role": "system", "content": "kind"}, {"role": "user", "content": "six"}, {"role": "assistant", "content": "seven"}]
    datum = conversation_datum({"messages": log}, idx=0, tokenizer=tokenizer, roles_to_train_on=["user"])
    assert trained_text(datum, tokenizer) == ["<|im_start|>user\nsix<|im_end|>\n<|im_start|>assistant\n"]
