"""From a file of JSON lines to rows: records, prompts, tokenizers, datums."""

import json
import subprocess
import sys

import pytest
import torch
from pydantic import ValidationError

from rl_core.data.tokenizer import load_tokenizer
from rl_core.errors import DataError
from rl_train.data.dataset_config import JsonlDatasetConfig
from rl_train.data.datasets import RecordDataset
from rl_train.data.processors import conversation_datum, prompt_datum
from rl_train.data.row_sections import OnTooLong
from rl_train.prompts.prompt_files import packaged_prompts
from rl_train.prompts.templates import PromptTemplate, load_prompt


def dataset_of(tmp_path, *rows, **config) -> RecordDataset:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n\n")
    return RecordDataset(JsonlDatasetConfig(path=path, **config))


def test_a_question_and_its_answer_become_a_record(tmp_path):
    dataset = dataset_of(
        tmp_path, {"question": "6*7?", "expected_answer": 42, "level": 3}, task_name="math", env_keys=("level",)
    )
    assert len(dataset) == 1
    assert dataset[0] == {
        "messages": [{"role": "user", "content": "6*7?"}],
        "extra_env_info": {"expected_answer": 42, "level": 3},
        "task_name": "math",
    }


def test_messages_responses_stop_strings_and_a_system_prompt_are_taken_over(tmp_path):
    row = {"chat": [{"role": "user", "content": "hi"}], "reply": "ho", "stops": ["\n"]}
    dataset = dataset_of(
        tmp_path,
        row,
        input_key="chat",
        output_key=None,
        response_key="reply",
        stop_strings_key="stops",
        system_prompt="be brief",
    )
    assert [message["content"] for message in dataset[0]["messages"]] == ["be brief", "hi", "ho"]
    assert dataset[0]["stop_strings"] == ["\n"]
    assert dataset[0]["extra_env_info"] == {}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{not json", "invalid JSON"),
        ("[1]", "expected a JSON object, found a list"),
        ({"expected_answer": 1}, r"the field 'question' \(`input_key`\) is missing"),
        ({"question": 3, "expected_answer": 1}, r"the field 'question' \(`input_key`\) is 3: expected str or list"),
        ({"question": "?", "expected_answer": None}, r"the field 'expected_answer' \(`output_key`\) is None"),
        ({"question": [{"role": "user"}], "expected_answer": 1}, "message 0 of 'question'"),
        ({"question": [], "expected_answer": 1}, "an empty list"),
    ],
)
def test_a_bad_row_is_refused_with_file_and_line_or_skipped_and_counted(tmp_path, row, said):
    good = {"question": "?", "expected_answer": 1}
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{said}"):
        dataset_of(tmp_path, good, row)
    dataset = dataset_of(tmp_path, good, row, good, on_bad_row="skip")
    assert (len(dataset), dataset.skipped) == (2, 1)


def test_a_dataset_without_a_good_row_or_without_a_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="no row to train on"):
        dataset_of(tmp_path, "{", on_bad_row="skip")
    with pytest.raises(DataError, match="does not exist"):
        RecordDataset(JsonlDatasetConfig(path=tmp_path / "absent.jsonl"))


def test_the_config_refuses_unknown_keys_and_imports_no_torch(tmp_path):
    with pytest.raises(ValidationError, match="Extra inputs"):
        JsonlDatasetConfig(path=tmp_path, inputkey="q")
    check = "import sys, rl_train.data.dataset_config; assert not {'torch', 'transformers', 'ray', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_prompts_come_from_yaml_from_text_and_from_the_package(tmp_path):
    (tmp_path / "p.yaml").write_text('system: You know {topic}.\nuser: "Q: {question} {{}}"\n')
    record = {"topic": "sums", "question": "6*7?"}
    assert load_prompt(tmp_path / "p.yaml").fill(record) == [
        {"role": "system", "content": "You know sums."},
        {"role": "user", "content": "Q: 6*7? {}"},
    ]
    (tmp_path / "p.txt").write_text("Think, then \\boxed{{}}: {}")
    assert load_prompt(tmp_path / "p.txt").fill(record, input_key="question")[0]["content"] == "Think, then \\boxed{}: 6*7?"
    math = load_prompt("generic/math").fill({"problem": "6*7?"})
    assert math[-1]["content"].endswith("\\boxed{}.\n\n6*7?")
    assert all(load_prompt(name) for name in packaged_prompts())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("user: '{question'", "braces"),
        ("user: '{question.__class__}'", "not a plain field name"),
        ("system: x", "user is required"),
        ("user: a\nuserr: b", "has no key 'userr'"),
        ("user: [", r"p\.yaml:1:8: Invalid YAML"),
    ],
)
def test_a_template_that_cannot_work_is_refused_when_it_is_read(tmp_path, text, said):
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(DataError, match=said):
        load_prompt(tmp_path / "p.yaml")


def test_a_field_that_the_record_lacks_and_an_unknown_name_are_named():
    with pytest.raises(DataError, match=r"uses \{answer\}, but the record does not have this field: it has \['question'\]"):
        PromptTemplate(user="{answer}").fill({"question": "?"})
    with pytest.raises(DataError, match=r"uses both \{\} and \{question\}: write \{\{\}\} for literal braces"):
        PromptTemplate(user=r"in \boxed{}: {question}").fill({"question": "?"}, input_key="question")
    with pytest.raises(DataError, match="generic/math"):
        load_prompt("generic/maths")


def test_a_byte_order_mark_is_removed_from_a_template(tmp_path, chat_tokenizer):
    (tmp_path / "p.txt").write_text("{}?", encoding="utf-8-sig")
    (tmp_path / "p.yaml").write_text("user: '{}?'", encoding="utf-8-sig")
    (tmp_path / "chat.jinja").write_text("{{ messages[0]['content'] }}", encoding="utf-8-sig")
    assert {load_prompt(tmp_path / name).user for name in ("p.txt", "p.yaml")} == {"{}?"}
    chat_tokenizer.save_pretrained(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(tmp_path / "tokenizer", chat_template=tmp_path / "chat.jinja")
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"


@pytest.mark.parametrize("value", [None, ["a", "b"], {"a": 1}])
def test_template_values_must_be_text_or_numbers(value):
    with pytest.raises(DataError, match=r"uses \{level\}, but this field is .*: templates need texts and numbers"):
        PromptTemplate(user="{level}").fill({"level": value})
    assert PromptTemplate(user="{level}").fill({"level": 3})[0]["content"] == "3"


def test_a_dataset_fills_its_prompt_template(tmp_path):
    dataset = dataset_of(tmp_path, {"problem": "6*7?", "expected_answer": 42}, input_key="problem", prompt="generic/math")
    assert dataset[0]["messages"][0]["content"].endswith("6*7?")


def test_the_single_field_of_a_template_takes_the_input_key(tmp_path):
    for row in ({"question": "6*7?", "expected_answer": 42}, {"problem": "6*7?", "expected_answer": 42}):
        dataset = dataset_of(tmp_path, row, prompt="generic/math")
        assert dataset[0]["messages"][0]["content"].endswith("6*7?")
        assert dataset.prompt_of(0) in ("6*7?", {"problem": "6*7?"})
    with pytest.raises(DataError, match=r"'question' \(`input_key`\) is missing"):
        dataset_of(tmp_path, {"task": "6*7?"}, prompt="generic/math")


def test_a_tokenizer_without_a_padding_token_pads_with_eos_on_the_right(tmp_path, chat_tokenizer):
    chat_tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path, chat_template="{{ messages[0]['content'] }}")
    assert loaded.padding_side == "right"
    assert loaded.pad_token == "<|pad|>"
    assert loaded.chat_template == "{{ messages[0]['content'] }}"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).pad_token == "<|im_end|>"


def test_a_missing_tokenizer_is_a_data_error_with_a_suggestion(tmp_path):
    with pytest.raises(DataError, match=r"does not exist\. Give the path of a model folder or \.gguf file"):
        load_tokenizer(tmp_path / "nothing.gguf")


def test_a_chat_template_that_is_neither_text_nor_file_is_refused(tmp_path, chat_tokenizer):
    chat_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(DataError, match="neither Jinja text nor an existing file"):
        load_tokenizer(tmp_path, chat_template="absent.jinja")


def test_a_tokenizer_is_read_from_a_gguf_file(tmp_path):
    from gguf import GGUFWriter

    path = tmp_path / "tiny.gguf"
    tokens = ["<s>", "</s>", *"abc", "ab"]
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = load_tokenizer(path)
    assert tokenizer("abc", add_special_tokens=False)["input_ids"] == [5, 4]
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.padding_side) == ("</s>", "</s>", "right")


RECORD = {
    "messages": [{"role": "user", "content": "what is six times seven"}, {"role": "assistant", "content": "forty two"}],
    "extra_env_info": {"expected_answer": 42},
    "task_name": "math",
}


def test_a_conversation_is_masked_to_the_answer(chat_tokenizer):
    datum = conversation_datum(RECORD, idx=3, tokenizer=chat_tokenizer)
    trained = torch.cat([m["token_ids"][m["token_loss_mask"].bool()] for m in datum["message_log"]])
    assert chat_tokenizer.decode(trained) == "forty two<|im_end|>"
    with pytest.raises(DataError, match="nothing to train on"):
        conversation_datum({"messages": RECORD["messages"][:1]}, idx=0, tokenizer=chat_tokenizer)


def test_a_prompt_over_the_limit_is_cut_and_not_trained_or_refused(chat_tokenizer):
    record = {**RECORD, "messages": RECORD["messages"][:1]}
    datum = prompt_datum(record, idx=0, tokenizer=chat_tokenizer, max_length=5)
    assert (datum["length"], datum["loss_multiplier"]) == (5, 0.0)
    assert sum(len(message["token_ids"]) for message in datum["message_log"]) == 5
    with pytest.raises(DataError, match=r"record 0 has \d+ tokens, but 5 are allowed"):
        prompt_datum(record, idx=0, tokenizer=chat_tokenizer, max_length=5, on_too_long=OnTooLong.ERROR)
