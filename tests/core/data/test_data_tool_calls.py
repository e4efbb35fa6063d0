"""Tools in rows of every format give the same record, and errors have their location."""

import json

import pytest
from datasets import Dataset

from rl_core.errors import DataError
from rl_train.data.dataset_config import (
    HuggingFaceDatasetConfig,
    JsonlDatasetConfig,
    ParquetDatasetConfig,
    PreferenceDatasetConfig,
)
from rl_train.data.datasets import RecordDataset
from rl_train.data.preferences import PreferenceDataset

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says what the sky is like.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
ASKED = {"role": "user", "content": "Is it wet in Bern?"}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "rain"}
ANSWERED = {"role": "assistant", "content": "Yes."}
TALK = [ASKED, CALLED, RESULT, ANSWERED]


def call(**changes) -> dict:
    """The assistant's message with a changed function in its call, as raw row data."""
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": changes}]}


@pytest.fixture
def read(tmp_path):
    def reading(*rows, of=RecordDataset, config=JsonlDatasetConfig, **keys):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = {} if of is PreferenceDataset else {"input_key": "messages", "output_key": None}
        return list(of(config(path=path, **{**given, **keys})))

    return reading


TEXT = call(name="weather", arguments='{"city": "Bern"}')
BARE = {"role": "assistant", "tool_calls": [{"id": "1", "name": "weather", "arguments": {"city": "Bern"}}]}
PARTS = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "ra"}, {"type": "text", "text": "in"}]}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TALK, "tools": [WEATHER]},
        {"messages": [ASKED, TEXT, RESULT, ANSWERED], "tools": json.dumps([WEATHER])},
        {"messages": [ASKED, BARE, PARTS, ANSWERED], "tools": [json.dumps(WEATHER)]},
        {"messages": TALK, "tools": [WEATHER["function"]]},
        {
            "messages": TALK,
            "tools": [{"function": {**WEATHER["function"], "parameters": json.dumps(WEATHER["function"]["parameters"])}}],
        },
    ],
    ids=["objects", "texts of JSON", "bare calls and parts", "bare functions", "parameters as a text"],
)
def test_all_formats_of_tools_and_calls_give_the_same_record(read, row):
    [record] = read(row)
    assert record["messages"] == TALK
    assert record["tools"] == [WEATHER]


def test_tables_give_the_same_calls_and_tools_as_lines_with_different_keys_per_row(read, tmp_path):
    asks = {"role": "assistant", "content": "", "tool_calls": [{"id": "2", "type": "function", "function": {}}]}
    asks["tool_calls"][0]["function"] = {"name": "clock", "arguments": {"zone": 1}}
    rows = [{"messages": TALK, "tools": [WEATHER, CLOCK]}, {"messages": [ASKED, asks], "tools": [CLOCK]}]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    config = ParquetDatasetConfig(path=tmp_path / "rows.parquet", input_key="messages", output_key=None)
    table, lines = list(RecordDataset(config)), read(*rows)
    assert table == lines
    (tmp_path / "files").mkdir()
    (tmp_path / "rows.jsonl").rename(tmp_path / "files" / "train.jsonl")
    config = HuggingFaceDatasetConfig(path=str(tmp_path / "files"), input_key="messages", output_key=None)
    assert list(RecordDataset(config)) == lines
    assert table[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"city": "Bern"}


def test_a_configured_tools_field_must_exist_in_every_row(read):
    for row in ({}, {"tools": None}, {"tools": []}, {"tools": "[]"}):
        assert "tools" not in read({"messages": TALK, **row})[0]
    assert "tools" not in read({"messages": TALK, "tools": "a saw"}, tools_key=None)[0]
    assert read({"messages": TALK, "functions": [WEATHER]}, tools_key="functions")[0]["tools"] == [WEATHER]
    with pytest.raises(
        DataError, match=r"rows\.jsonl:1: the field 'functions' \(`tools_key`\) is missing: the row has \['mess"
    ):
        read({"messages": TALK}, tools_key="functions")
    for row in ({"info": {"tools": None}}, {"info": {"tools": []}}):
        assert "tools" not in read({"messages": TALK, **row}, tools_key="info.tools")[0]
    with pytest.raises(DataError, match=r"the field 'info\.tools' \(`tools_key`\) is missing"):
        read({"messages": TALK, "info": {}}, tools_key="info.tools")


def test_a_custom_function_returns_tools_with_its_record(read, tmp_path, monkeypatch):
    (tmp_path / "my_rows.py").write_text("def record(row):\n    return {'messages': row['m'], 'tools': row['t']}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"m": TALK, "t": [WEATHER]}) + "\n" + json.dumps({"m": TALK, "t": [CLOCK]}) + "\n")
    with pytest.raises(DataError, match=r"own\.jsonl:2: .*calls 'weather', but the row offers clock"):
        RecordDataset(JsonlDatasetConfig(path=path, record_fn="my_rows.record"))
    dataset = RecordDataset(JsonlDatasetConfig(path=path, record_fn="my_rows.record", on_bad_row="skip"))
    assert [record["tools"] for record in dataset] == [[WEATHER]]


def test_pairs_are_offered_tools_and_results_in_an_answer_may_answer_calls_of_the_prompt(read):
    wrong = {"role": "assistant", "content": "No."}
    row = {"prompt": [ASKED], "chosen": TALK[1:], "rejected": [wrong], "tools": [WEATHER]}
    [pair] = read(row, of=PreferenceDataset, config=PreferenceDatasetConfig)
    assert (pair["prompt"], pair["chosen"], pair["tools"]) == ([ASKED], TALK[1:], [WEATHER])
    whole = {"chosen": TALK, "rejected": [*TALK[:3], wrong]}
    [pair] = read(whole, of=PreferenceDataset, config=PreferenceDatasetConfig)
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == (TALK[:3], [ANSWERED], [wrong])
    stray = {**row, "rejected": [RESULT, wrong]}
    with pytest.raises(DataError, match=r"rows\.jsonl:1: message 1 of the conversation is a tool result but does not match"):
        read(stray, of=PreferenceDataset, config=PreferenceDatasetConfig)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (
            [ASKED, CALLED, {**RESULT, "tool_call_id": "7"}],
            "tool_call_id '7', which does not match a pending call. Pending ",
        ),
        ([ASKED, CALLED, RESULT, RESULT], "message 3 of the conversation is a tool result but does not match any"),
        ([ASKED, RESULT], "message 1 of the conversation is a tool result but does not match any"),
        ([ASKED, CALLED, ASKED, RESULT], "message 3 of the conversation is a tool result"),
        (
            [ASKED, CALLED, {"role": "tool", "name": "clock", "content": "3"}],
            "has the name 'clock', which does not match a pending call",
        ),
        (
            [ASKED, call(name="saw", arguments={})],
            "message 1 of the conversation calls 'saw', but the row offers weather, clock",
        ),
        (
            [ASKED, call(name="weather", arguments="Bern")],
            "`arguments` of call 0 of message 1 of 'messages' is the text 'Bern': invalid",
        ),
        ([ASKED, call(name="weather", arguments='{"a": 1, "a": 2}')], "the key 'a' occurs twice in one object"),
        (
            [ASKED, call(name="weather", arguments="[1]")],
            "`arguments` of call 0 of message 1 of 'messages' is '[1]': expected a JSON",
        ),
        ([ASKED, call(name="weather")], "is None: expected a JSON object or its text ({} for none)"),
        (
            [ASKED, call(arguments={})],
            "call 0 of message 1 of 'messages' is {'id': '1', 'type': 'function', 'function': {'arguments",
        ),
        ([ASKED, {**CALLED, "tool_calls": "weather"}], "has the tool_calls 'weather': expected a list"),
        ([ASKED, {**CALLED, "tool_calls": CALLED["tool_calls"] * 2}], "several calls with the same id, ['1', '1']"),
        (
            [{**ASKED, "tool_calls": CALLED["tool_calls"]}],
            "has tool_calls and the role 'user': tool_calls is only allowed with the role 'assis",
        ),
        ([{**ASKED, "tool_call_id": "1"}], "has tool_call_id and the role 'user'"),
        ([{**ASKED, "prefix": True}], "has prefix and the role 'user': prefix is only allowed with the role 'assistant'"),
        ([ASKED, CALLED, {**RESULT, "content": {"sky": "wet"}}], "has the content {'sky': 'wet'}: expected a text"),
    ],
)
def test_inconsistent_tool_calls_and_results_are_bad_rows(read, messages, says):
    row = {"messages": messages, "tools": [WEATHER, CLOCK]}
    with pytest.raises(DataError) as caught:
        read({"messages": TALK}, row)
    assert "rows.jsonl:2: " in str(caught.value)
    assert says in str(caught.value)
    assert len(read({"messages": TALK}, row, on_bad_row="skip")) == 1


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ({"weather": {}}, "is {'weather': {}}: expected a list of functions"),
        ("weather", "the field 'tools' (`tools_key`) is the text 'weather': invalid JSON"),
        (["weather"], "tool 0 of the field 'tools' (`tools_key`) is the text 'weather': invalid JSON"),
        ([3], "tool 0 of the field 'tools' (`tools_key`) is 3: expected {type: function"),
        ([{"type": "web_search"}], "is of the type 'web_search': only functions"),
        ([{"type": "function", "function": {"description": "a"}}], "which has no name"),
        (
            [{"name": "weather", "parameters": [1]}],
            "`parameters` of tool 0 of the field 'tools' (`tools_key`) is [1]: expected a JSON",
        ),
    ],
)
def test_invalid_tools_are_a_bad_row_with_the_key_to_change(read, tools, says):
    with pytest.raises(DataError) as caught:
        read({"messages": TALK, "tools": tools})
    assert "rows.jsonl:1: " in str(caught.value)
    assert says in str(caught.value)


def test_results_without_ids_answer_by_name_or_in_order_and_several_calls_may_share_one_result(read):
    both = {"role": "assistant", "tool_calls": [{"name": name, "arguments": {}} for name in ("weather", "clock")]}
    by_name = [{"role": "tool", "name": name, "content": "a"} for name in ("clock", "weather")]
    in_order = [{"role": "tool", "content": "a"}] * 2
    for results in (by_name, in_order, in_order[:1], []):
        assert len(read({"messages": [ASKED, both, *results, ANSWERED]})) == 1
    with pytest.raises(DataError, match="does not match any tool call"):
        read({"messages": [ASKED, both, *in_order, *in_order]})
    with pytest.raises(DataError, match=r"does not match a pending call. Pending calls: \[None, None\]"):
        read({"messages": [ASKED, both, RESULT]})
