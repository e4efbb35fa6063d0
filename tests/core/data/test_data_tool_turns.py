"""Rollouts with tool calls: the tokens of all turns are those of the whole conversation, and only sampled ones are trained."""

import json

import pytest
import torch
from template_styles import expected, tokenizer_of
from tool_styles import STYLES, TOOLS

from rl_core.errors import DataError
from rl_train.data.processors import prompt_datum
from rl_train.data.special_tokens import decode_answers
from rl_train.rollouts.drivers import TurnFormatter
from rl_train.rollouts.trajectory import Trajectory, to_batch

ASKED = {"role": "user", "content": "wet?"}
ANSWERED = {"role": "assistant", "content": "yes"}


@pytest.fixture(scope="module")
def tokenizers():
    return {name: tokenizer_of(style) for name, (style, _) in STYLES.items()}


def call(name, number):
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": {"city": "Bern"}}}


def result(name, number):
    return {"role": "tool", "tool_call_id": f"call{number:05}", "name": name, "content": f"rain {number}"}


def played(tokenizer, style, log, tools):
    """A rollout of the log whose sampled texts are those that the style's hand-written segments say a model samples."""
    datum = prompt_datum({"messages": log[:1], "tools": tools}, idx=0, tokenizer=tokenizer)
    row = Trajectory(
        message_log=datum["message_log"], metadata=None, task_name="t", group_id=0, index=0, ordinal=0, sample=0,
        tools=datum.get("tools"),
    )  # fmt: skip
    formatter = TurnFormatter(tokenizer)
    sampled = [text for text, is_sampled in style.by_hand(log, tools) if is_sampled]
    observed: list = []
    for message in log[1:]:
        if message["role"] == "assistant":
            if observed:
                ids = formatter.observation_ids(observed, row.message_log[-1]["token_ids"], tools=row.tools)
                row.add_observation(observed, ids)
                observed = []
            ids = torch.tensor(tokenizer(sampled.pop(0), add_special_tokens=False)["input_ids"])
            row.add_answer(message["content"], ids, torch.full((len(ids),), -1.0))
        else:
            observed.append(message)
    return row


@pytest.mark.parametrize(
    ("name", "calls_in_first_turn"), [(name, count) for name, (_, most) in STYLES.items() for count in range(1, most + 1)]
)
def test_tokens_and_mask_of_a_rollout_with_tool_results_equal_those_of_the_whole_conversation(
    tokenizers, name, calls_in_first_turn
):
    style, _ = STYLES[name]
    names = ["weather", "clock"][:calls_in_first_turn]
    log = [
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call(tool, i) for i, tool in enumerate(names)]},
        *(result(tool, i) for i, tool in enumerate(names)),
        {"role": "assistant", "content": "", "tool_calls": [call("clock", 7)]},
        result("clock", 7),
        ANSWERED,
    ]
    row = played(tokenizers[name], style, log, TOOLS)
    ids, mask = expected(style.by_hand(log, TOOLS), tokenizers[name])
    # The template may write a line break after the end of the last turn, which nobody samples.
    length = row.num_tokens()
    assert row.token_ids().tolist() == ids[:length]
    assert not any(mask[length:])
    batch = to_batch([row])
    assert batch["token_mask"][0].tolist() == mask[:length]
    assert batch["generation_logprobs"][0].tolist() == [-value for value in mask[:length]]
    assert [message["role"] for message in row.conversation()] == [message["role"] for message in log]
    assert row.conversation()[2]["tool_call_id"] == "call00000"


@pytest.mark.parametrize("name", STYLES)
def test_an_environment_message_after_an_answer_is_rendered_as_a_user_message_with_the_same_tools(tokenizers, name):
    style, _ = STYLES[name]
    log = [ASKED, {"role": "assistant", "content": "no"}, {"role": "user", "content": "sure?"}, ANSWERED]
    row = played(tokenizers[name], style, [log[0], log[1], {**log[2], "role": "environment"}, log[3]], TOOLS)
    ids, mask = expected(style.by_hand(log, TOOLS), tokenizers[name])
    assert row.token_ids().tolist() == ids[: row.num_tokens()]
    assert to_batch([row])["token_mask"][0].tolist() == mask[: row.num_tokens()]


def test_two_results_follow_one_answer_even_if_the_template_renders_only_one_call(tokenizers):
    formatter = TurnFormatter(tokenizers["llama"])
    sampled = torch.tensor([tokenizers["llama"].eos_token_id])
    text = tokenizers["llama"].decode(formatter.observation_ids([result("weather", 0), result("clock", 1)], sampled))
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    ipython = header.format("ipython")
    assert text == f'{ipython}"rain 0"<|eot_id|>{ipython}"rain 1"<|eot_id|>' + header.format("assistant")


def test_tool_results_are_refused_if_the_template_omits_them(tokenizers):
    tokenizer = tokenizer_of(STYLES["hermes"][0])
    tokenizer.chat_template = tokenizer.chat_template.replace("m['content'] + '\n</tool_response>'", "'\n</tool_response>'")
    with pytest.raises(DataError, match="leaves out tool results"):
        TurnFormatter(tokenizer).observation_ids(result("clock", 0), torch.tensor([tokenizer.eos_token_id]))


def test_a_turn_that_ends_with_another_end_token_than_the_template_writes_is_not_closed_twice(tmp_path):
    style = STYLES["llama"][0]
    tokenizer = tokenizer_of(style)
    tokenizer.add_special_tokens({"additional_special_tokens": [*style.special, "<|eom_id|>", "<|python_tag|>"]})
    ends = tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<|eom_id|>"])
    tmp_path.joinpath("generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    tokenizer.name_or_path = str(tmp_path)
    formatter = TurnFormatter(tokenizer)
    sampled = {end: torch.tensor(tokenizer.convert_tokens_to_ids([end])) for end in ("<|eot_id|>", "<|eom_id|>", "t")}
    after = {end: tokenizer.decode(formatter.observation_ids(result("clock", 0), ids)) for end, ids in sampled.items()}
    assert after["<|eom_id|>"] == after["<|eot_id|>"]
    assert after["t"] == "<|eot_id|>" + after["<|eot_id|>"]


def test_special_tokens_of_tool_calls_stay_in_the_text_that_environments_read():
    tokenizer = tokenizer_of(STYLES["llama"][0])
    tokenizer.add_special_tokens({"additional_special_tokens": [*STYLES["llama"][0].special, "<|python_tag|>", "[TOOL_CALLS]"]})
    answers = ["<|python_tag|>clock()<|eot_id|><|pad|>", "[TOOL_CALLS] [{}]<|eot_id|>", "the answer<|eot_id|>"]
    rows = [torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in answers]
    assert decode_answers(tokenizer, rows) == ["<|python_tag|>clock()", "[TOOL_CALLS] [{}]", "the answer"]
