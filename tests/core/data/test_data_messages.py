"""Message logs: their tokens equal those of the template, and other tokens are not trained."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rl_core.errors import DataError
from rl_train.data.messages import (
    add_loss_mask_to_message_log,
    batched_message_log_to_flat_message,
    get_first_index_that_differs,
    get_formatted_message_log,
    message_log_to_flat_messages,
)

CONTENTS = st.text(st.characters(codec="utf-8", exclude_characters="<|>"), max_size=20)
TURNS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), CONTENTS), min_size=1, max_size=6)


def log_of(*turns: tuple[str, str]) -> list[dict]:
    return [{"role": role, "content": content} for role, content in turns]


def tokens_of(log: list[dict]) -> list[int]:
    return torch.cat([message["token_ids"] for message in log]).tolist()


@example(turns=[("assistant", ""), ("system", "rlcoreanswer")], header=False)  # the word that stands in for an answer
@given(turns=TURNS, header=st.booleans())
def test_concatenated_token_ids_are_the_template_of_the_whole_conversation(chat_tokenizer, turns, header):
    log = log_of(*turns)
    formatted = get_formatted_message_log(log, chat_tokenizer, add_generation_prompt=header)
    whole = chat_tokenizer.apply_chat_template(log, add_generation_prompt=header, return_dict=False)
    assert tokens_of(formatted) == whole
    assert [(message["role"], message["content"]) for message in formatted] == list(turns)


def test_the_header_of_an_answer_belongs_to_the_message_before_it(chat_tokenizer):
    formatted = get_formatted_message_log(log_of(("user", "six times seven"), ("assistant", "forty two")), chat_tokenizer)
    texts = [chat_tokenizer.decode(message["token_ids"]) for message in formatted]
    assert texts == ["<|im_start|>user\nsix times seven<|im_end|>\n<|im_start|>assistant\n", "forty two<|im_end|>\n"]


def test_sampled_and_trained_rows_start_with_the_same_prompt_tokens(chat_tokenizer):
    question, answer = ("user", "what is six"), ("assistant", " is it?")
    prompt = get_formatted_message_log(log_of(question), chat_tokenizer, add_generation_prompt=True)
    trained = get_formatted_message_log(log_of(question, answer), chat_tokenizer)
    assert tokens_of(prompt) == trained[0]["token_ids"].tolist()


def test_a_trained_answer_whose_question_the_template_drops_is_refused(chat_tokenizer):
    last_only = "{% if loop.index > messages | length - 3 %}: {{ m['content'] }}{% endif %}"
    template = "{% for m in messages %}{{ m['role'] }}" + last_only + ";{% endfor %}"
    log = log_of(("user", "why?"), ("assistant", "so"), ("user", "and?"), ("assistant", "no"))
    with pytest.raises(DataError, match=r"leaves out message 0 \(from 0\) of the role 'user' once message 1 follows"):
        get_formatted_message_log(log, _with_template(chat_tokenizer, template))


def test_a_beginning_that_the_template_refuses_gives_its_tokens_to_the_next_message(chat_tokenizer):
    needs_user = "{% if messages[-1]['role'] == 'system' %}{{ raise_exception('no user') }}{% endif %}"
    tokenizer = _with_template(chat_tokenizer, needs_user + chat_tokenizer.chat_template)
    log = log_of(("system", "be brief"), ("user", "six"))
    formatted = get_formatted_message_log(log, tokenizer)
    assert formatted[0]["token_ids"].tolist() == []
    assert tokens_of(formatted) == tokenizer.apply_chat_template(log, return_dict=False)
    with pytest.raises(DataError, match=r"cannot render messages of the roles \['system'\]: no user"):
        get_formatted_message_log(log[:1], tokenizer)


def test_without_a_template_contents_are_joined_between_bos_and_eos(plain_tokenizer):
    log = log_of(("user", "six times"), ("assistant", " seven"))
    formatted = get_formatted_message_log(log, plain_tokenizer)
    assert [plain_tokenizer.decode(message["token_ids"]) for message in formatted] == [
        "<|im_start|>six times",
        " seven<|im_end|>",
    ]
    bare = get_formatted_message_log(log, plain_tokenizer, add_bos_token=False, add_eos_token=False)
    assert plain_tokenizer.decode(tokens_of(bare)) == "six times seven"


def _with_template(tokenizer, template):
    from copy import deepcopy

    changed = deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def tokenised(*turns: tuple[str, int]) -> list[dict]:
    return [{"role": role, "content": role, "token_ids": torch.arange(length)} for role, length in turns]


@pytest.mark.parametrize(
    ("roles", "only_final", "expected"),
    [
        (["assistant"], False, [0, 0, 1, 0, 1]),
        (["assistant"], True, [0, 0, 0, 0, 1]),
        (["user", "assistant"], False, [1, 1, 1, 1, 1]),
        (["tool"], True, [0, 0, 0, 0, 0]),
    ],
)
def test_the_loss_mask_is_one_on_trained_roles(roles, only_final, expected):
    log = tokenised(("user", 2), ("assistant", 1), ("user", 1), ("assistant", 1))
    add_loss_mask_to_message_log([log], roles, only_final)
    assert torch.cat([message["token_loss_mask"] for message in log]).tolist() == expected


def test_flat_messages_fill_fields_that_some_messages_lack_with_their_padding():
    log = tokenised(("user", 2), ("assistant", 2))
    log[1]["generation_logprobs"] = torch.tensor([-1.0, -2.0])
    log[1]["name"] = "bot"
    flat = message_log_to_flat_messages(log)
    assert flat["token_ids"].tolist() == [0, 1, 0, 1]
    assert flat["generation_logprobs"].tolist() == [0.0, 0.0, -1.0, -2.0]
    assert flat["role"] == ["user", "assistant"]
    assert flat["name"] == [None, "bot"]


def test_flat_batches_are_right_padded_to_the_multiple_and_report_lengths():
    logs = [tokenised(("user", 2)), tokenised(("user", 2), ("assistant", 3))]
    logs[1][1]["generation_logprobs"] = torch.full((3,), -1.0)
    batch, lengths = batched_message_log_to_flat_message(logs, {"token_ids": 9}, make_sequence_length_divisible_by=4)
    assert lengths.tolist() == [2, 5]
    assert batch["token_ids"].tolist() == [[0, 1, 9, 9, 9, 9, 9, 9], [0, 1, 0, 1, 2, 9, 9, 9]]
    assert batch["generation_logprobs"].tolist() == [[0] * 8, [0, 0, -1, -1, -1, 0, 0, 0]]
    assert batch["role"] == [["user"], ["user", "assistant"]]


def test_a_field_of_another_length_than_its_tokens_is_refused():
    log = tokenised(("user", 2))
    log[0]["advantages"] = torch.ones(3)
    with pytest.raises(DataError, match="2 token_ids but 3 advantages"):
        message_log_to_flat_messages(log)


@pytest.mark.parametrize("flatten", [message_log_to_flat_messages, lambda log: batched_message_log_to_flat_message([log])])
def test_messages_without_tokens_are_refused_with_the_function_that_tokenizes_them(flatten):
    with pytest.raises(DataError, match=r"A 'user' message has no token_ids.*get_formatted_message_log"):
        flatten([{"role": "user", "content": "hello"}])


def test_a_loss_mask_needs_tokenized_messages():
    with pytest.raises(DataError, match="has no token_ids"):
        add_loss_mask_to_message_log([[{"role": "user", "content": "hello"}]])


def test_the_first_difference_of_two_texts():
    assert get_first_index_that_differs("abc", "abd") == 2
    assert get_first_index_that_differs("ab", "abc") == 2
    assert get_first_index_that_differs([1], [2]) == 0


def test_token_ids_that_are_not_integers_are_refused_when_messages_are_joined():
    log = [
        {"role": "user", "content": "a", "token_ids": torch.tensor([1, 2])},
        {"role": "assistant", "content": "b", "token_ids": torch.tensor([1.5, 2.0])},
    ]
    with pytest.raises(DataError, match=r"`token_ids` of a message have dtype torch.float32: \[1.5, 2.0\]. Pass integers"):
        batched_message_log_to_flat_message([log])
    with pytest.raises(DataError, match="Pass integers"):
        message_log_to_flat_messages(log)
