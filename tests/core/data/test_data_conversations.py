"""Conversations in OpenAI format: which are accepted, and which are rejected with a reason."""

import json

import pytest
from pydantic import ValidationError

from rl_core.errors import ConfigError, DataError
from rl_train.data.conversations import read_messages
from rl_train.data.dataset_config import JsonlDatasetConfig, PreferenceDatasetConfig
from rl_train.data.datasets import RecordDataset
from rl_train.data.preferences import PreferenceDataset
from rl_train.data.processors import conversation_datum

ASKED, ANSWERED = {"role": "user", "content": "6*7?"}, {"role": "assistant", "content": "42"}


@pytest.fixture
def read(tmp_path):
    def reading(row, *, of=RecordDataset, config=JsonlDatasetConfig, **keys):
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(row) + "\n")
        return list(of(config(path=path, **keys)))

    return reading


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"messages": [ASKED, ANSWERED]}, {"input_key": "messages"}),
        ({"messages": [ASKED, {"role": "assistant", "content": "42", "tool_calls": None}]}, {"input_key": "messages"}),
        ({"messages": [{**ASKED, "content": [{"type": "text", "text": "6*"}, {"type": "text", "text": "7?"}]}, ANSWERED]}, {}),
        ({"prompt": [ASKED], "completion": [ANSWERED]}, {"input_key": "prompt", "response_key": "completion"}),
        ({"prompt": "6*7?", "completion": "42"}, {"input_key": "prompt", "response_key": "completion"}),
    ],
    ids=["messages", "null keys", "text parts", "conversational completion", "completion"],
)
def test_every_form_of_a_conversation_is_the_same_record(read, row, keys):
    [record] = read(row, output_key=None, **{"input_key": "messages", **keys})
    assert record["messages"] == [ASKED, ANSWERED]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (
            {"role": "function", "name": "f", "content": "42"},
            "in the old format (function_call, role 'function'): use `tool_calls`",
        ),
        ({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}, "in the old format"),
        ({"role": "human", "content": "a"}, "role 'human': expected one of system, developer, user, assistant, tool"),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "a"}}]},
            "part of type 'input_audio': only text and images are supported",
        ),
        ({"role": "user", "content": ["a"]}, "part of type 'str'"),
        ({"role": "user", "content": 3}, "has the content 3"),
        ({"role": "user", "content": "a\ud83d"}, "has an unpaired surrogate, '\\ud83d', at index 1"),
        ({"role": "user", "content": None}, "is not {role, content}"),
        ({"role": "assistant", "content": "a", "weight": 0.5}, "weight 0.5: expected 1"),
        ("a", "is not {role, content}: found 'a'"),
    ],
)
def test_invalid_training_conversations_are_errors_with_a_reason(message, says):
    with pytest.raises(DataError) as caught:
        read_messages([ASKED, message], "x", role="user")
    assert says in str(caught.value)


def test_a_completion_must_end_with_the_assistant_and_a_template_is_for_texts(read):
    with pytest.raises(DataError, match="ends with a message of the role 'user'"):
        read({"prompt": "a", "completion": [ASKED]}, input_key="prompt", response_key="completion", output_key=None)
    with pytest.raises(DataError, match="prompt templates need a text"):
        read({"question": [ASKED]}, output_key=None, prompt="generic/math")


def test_rows_without_an_answer_key_are_errors_that_name_the_key(read, chat_tokenizer):
    with pytest.raises(DataError, match="If there is none, set `output_key: null`"):
        read({"messages": [ASKED, ANSWERED]}, input_key="messages")
    with pytest.raises(DataError, match="For conversations, set `input_key: messages` and `output_key: null`"):
        read({"messages": [ASKED, ANSWERED]})
    [record] = read({"question": "6*7?", "expected_answer": "42"})
    with pytest.raises(DataError, match=r"nothing to train on\. Set the field of the answer \(`response_key`\)"):
        conversation_datum(record, idx=0, tokenizer=chat_tokenizer)


def test_a_system_prompt_takes_the_place_of_the_templates_and_not_of_the_rows(read, tmp_path):
    (tmp_path / "p.yaml").write_text('system: from the template\nuser: "{}"\n')
    template = str(tmp_path / "p.yaml")
    row = {"question": "6*7?"}
    [record] = read(row, output_key=None, prompt=template)
    assert record["messages"][0]["content"] == "from the template"
    [record] = read(row, output_key=None, prompt=template, system_prompt="from the config")
    assert [message["content"] for message in record["messages"]] == ["from the config", "6*7?"]
    [record] = read({"question": [{"role": "developer", "content": "x"}, ASKED]}, output_key=None, system_prompt="y")
    assert [message["role"] for message in record["messages"]] == ["developer", "user"]


@pytest.mark.parametrize(
    ("name", "row", "answer"),
    [
        ("gsm8k", {"question": "6*7?", "answer": "It is\n#### 1,042"}, "It is\n#### 1,042"),
        ("alpaca", {"instruction": "Add.", "input": "2 2", "output": "4"}, "4"),
        ("sharegpt", {"conversations": [{"from": "human", "value": "6*7?"}, {"from": "gpt", "value": "42"}]}, "42"),
    ],
)
def test_a_packaged_function_reads_rows_of_a_well_known_form(read, name, row, answer):
    [record] = read(row, record_fn=name)
    assert record["messages"][-1] == {"role": "assistant", "content": answer}
    assert record["extra_env_info"] == ({"expected_answer": "1042"} if name == "gsm8k" else {})
    with pytest.raises(DataError, match=r"rows\.jsonl:1: "):
        read({"other": 1}, record_fn=name)


def test_calls_and_observations_of_sharegpt_are_calls_and_results(read):
    row = {
        "conversations": [
            {"from": "human", "value": "Is it wet?"},
            {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Bern"}}'},
            {"from": "observation", "value": "rain"},
            {"from": "gpt", "value": "Yes."},
        ],
        "system": "Be brief.",
        "tools": '[{"name": "weather", "parameters": {}}]',
    }
    [record] = read(row, record_fn="sharegpt")
    assert [message["role"] for message in record["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    [call] = record["messages"][2]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": {"city": "Bern"}}
    assert record["tools"][0]["function"]["name"] == "weather"
    row["conversations"][1]["value"] = "weather in Bern"
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the call in turn 1 is the text 'weather in Bern': invalid JSON"):
        read(row, record_fn="sharegpt")


def halves(row):
    if "|" not in row["line"]:
        raise DataError(f"{row['line']!r} has no bar")
    asked, answered = row["line"].split("|")
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}


def nothing(row):
    return {"asked": row["line"]}


def with_answer(row):
    return {"messages": [ASKED], "extra_env_info": {"expected_answer": eval(row["answer"]), "lists": [1, [2]]}}


def as_pair(row):
    return {"prompt": row["q"], "chosen": row["good"], "rejected": row["bad"]}


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("['1', '2']", r"is \['1', '2'\]: an expected answer is a text or a number.*under another key of `extra_env_info`"),
        ("{'a': 1}", r"is \{'a': 1\}: an expected answer is"),
        ("float('nan')", "is nan, which cannot be compared with an answer"),
        ("float('-inf')", "is -inf, "),
        ("chr(0xD800)", "surrogate"),
    ],
)
def test_an_expected_answer_of_a_function_is_checked_as_one_of_a_file_is(read, monkeypatch, answer, says):
    monkeypatch.syspath_prepend(str(__file__.rpartition("/")[0]))
    function = "test_data_conversations.with_answer"
    named = rf"rows\.jsonl:1: `expected_answer` of the result of record_fn {function} "
    with pytest.raises(DataError, match=f"(?s){named}.*{says}"):
        read({"answer": answer}, record_fn=function)
    [record] = read({"answer": "42"}, record_fn=function)
    assert record["extra_env_info"] == {"expected_answer": 42, "lists": [1, [2]]}  # for an environment that reads them


def test_records_of_a_custom_function_are_checked(read, monkeypatch):
    monkeypatch.syspath_prepend(str(__file__.rpartition("/")[0]))
    [record] = read({"line": "6*7?|42"}, record_fn="test_data_conversations.halves", task_name="math")
    assert record == {"messages": [ASKED, ANSWERED], "extra_env_info": {}, "task_name": "math"}
    with pytest.raises(DataError, match=r"rows\.jsonl:1: 'x' has no bar"):
        read({"line": "x"}, record_fn="test_data_conversations:halves")
    with pytest.raises(DataError, match=r"returned \['asked'\]: expected a record with `messages`"):
        read({"line": "x"}, record_fn="test_data_conversations.nothing")
    with pytest.raises(
        ConfigError, match=r"rows\.jsonl:1: record_fn test_data_conversations\.halves raised KeyError at .*: 'line'"
    ):
        read({"text": "x"}, record_fn="test_data_conversations.halves", on_bad_row="skip")
    row = {"q": "6*7?", "good": "42", "bad": "41"}
    keys = {"of": PreferenceDataset, "config": PreferenceDatasetConfig, "record_fn": "test_data_conversations.as_pair"}
    assert read(row, **keys)[0]["chosen"] == [ANSWERED]


def test_missing_functions_and_unused_keys_are_errors(read, tmp_path):
    with pytest.raises(ConfigError, match=r"expected alpaca, boolq, gpqa, gsm8k, .*, winogrande, or the path of a function"):
        read({}, record_fn="alpacca")
    with pytest.raises(ConfigError, match="cannot import 'no_such_module'"):
        read({}, record_fn="no_such_module.function")
    with pytest.raises(ConfigError, match="json has no 'loadz'"):
        read({}, record_fn="json.loadz")
    with pytest.raises(ValidationError, match="input_key would have no effect"):
        JsonlDatasetConfig(path=tmp_path, record_fn="gsm8k", input_key="q")
    with pytest.raises(ValidationError, match="chosen_key would have no effect"):
        PreferenceDatasetConfig(path=tmp_path, record_fn="gsm8k", chosen_key="q")
