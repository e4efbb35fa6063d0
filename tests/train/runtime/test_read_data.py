"""From data sections to loaders: prompts, mixtures, held-out rows, custom processors, bad rows."""

import json
import logging
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from rl_core.config.schema import DatasetConfig, EnvironmentConfig, PolicyConfig
from rl_core.data.tokenizer import load_tokenizer
from rl_core.errors import ConfigError, DataError
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.algorithms.policy_configs import GRPOConfig
from rl_train.algorithms.supervised_configs import SFTConfig
from rl_train.assembly.checks import is_conversational
from rl_train.assembly.data import Source, conversation_loader, preference_loader, prompt_loader, read_data
from rl_train.assembly.preparation import DataLoaders
from rl_train.assembly.run_assembly import plan_policy_and_engine
from rl_train.config.loader import load_config
from rl_train.config.schema import DataConfig, LossConfig, PromptConfig, RunConfig, SplitConfig
from rl_train.data import processors
from rl_train.data.dataset_config import JsonlDatasetConfig, PreferenceDatasetConfig
from rl_train.data.processors import conversation_datum
from rl_train.evaluation.evaluate import plan_evaluation

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry(discover())


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(MODEL)


@pytest.fixture
def lines(tmp_path):
    def write(name: str, *rows) -> Path:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write


def sums(first: int, count: int) -> list[dict]:
    return [{"question": f"{first}+{n}=", "expected_answer": str(first + n)} for n in range(count)]


def answered(rows: list[dict]) -> list[dict]:
    return [{"question": row["question"], "answer": row["expected_answer"]} for row in rows]


def run_of(data: DataConfig, *, tasks: tuple[str, ...] = (), **algorithm) -> RunConfig:
    return RunConfig(
        algorithm_name="sft",
        algorithm=SFTConfig(**algorithm),
        loss_fn=LossConfig(),
        policy=PolicyConfig(backend="hf", model_name=str(MODEL), max_total_sequence_length=16),
        data=data,
        env={task: EnvironmentConfig() for task in tasks},
    )


def section(path: Path, **keys) -> JsonlDatasetConfig:
    return JsonlDatasetConfig(path=path, **keys)


def texts(batch, tokenizer) -> list[str]:
    return [tokenizer.decode(torch.cat([m["token_ids"] for m in row["message_log"]])) for row in batch]


def test_the_members_of_a_mixture_keep_their_tasks_and_their_share_of_every_batch(lines, registry, tokenizer):
    few, many = lines("few", *sums(1, 6)), lines("many", *sums(2, 60))
    mix = {"few": section(few, task_name="a", weight=3.0), "many": section(many, task_name="b", weight=1.0)}
    data = DataConfig(mix=mix)
    train, validation = read_data(data, registry)
    assert validation is None
    loader = prompt_loader(train, run_of(data, tasks=("a", "b")), tokenizer, batch_size=8, shuffle=True)
    for batch in loader:
        tasks = [row["task_name"] for row in batch]
        assert sorted(tasks) == ["a"] * 6 + ["b"] * 2
        assert all(text.startswith("12"[task == "b"]) for text, task in zip(texts(batch, tokenizer), tasks, strict=True))


def named_rows(lines, *tasks: str | None) -> DataConfig:
    rows = [
        {"messages": [{"role": "user", "content": f"1+{n}="}], **({} if task is None else {"task_name": task})}
        for n, task in enumerate(tasks)
    ]
    return DataConfig(train=section(lines("named", *rows), record_fn="record"))


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_a_row_whose_task_has_no_environment_is_refused_with_its_line(lines, registry, tokenizer, on_bad_row, caplog):
    data = named_rows(lines, "a", "b", "typo")
    data = data.model_copy(update={"train": data.train.model_copy(update={"on_bad_row": on_bad_row})})
    train, _ = read_data(data, registry)
    message = "named.jsonl:3: its task_name is 'typo', but `env` has no such task. Tasks in `env`: a, b"
    if on_bad_row == "error":
        with pytest.raises(DataError, match=message):
            prompt_loader(train, run_of(data, tasks=("a", "b")), tokenizer, batch_size=2, shuffle=True)
    else:
        loader = prompt_loader(train, run_of(data, tasks=("a", "b")), tokenizer, batch_size=2, shuffle=True)
        assert sorted(loader.dataset[n]["task_name"] for n in range(len(loader.dataset))) == ["a", "b"]
        assert message in caplog.text


def test_rows_without_a_task_need_one_if_there_are_several_environments(lines, registry, tokenizer):
    data = named_rows(lines, "a", None)
    train, _ = read_data(data, registry)
    with pytest.raises(DataError, match=r"named.jsonl:2: it has no task_name, and `env` has several tasks \(a, b\)"):
        prompt_loader(train, run_of(data, tasks=("a", "b")), tokenizer, batch_size=2, shuffle=True)


@pytest.mark.parametrize(("tasks", "line"), [(("math", "typo"), 2), (("typo", "math"), 2), (("typo", "other"), 2)])
def test_rows_that_name_several_tasks_must_name_those_of_env_even_if_there_is_only_one(lines, registry, tokenizer, tasks, line):
    data = named_rows(lines, *tasks)
    train, _ = read_data(data, registry)
    with pytest.raises(DataError, match=rf"named.jsonl:{line}: its task_name is '{tasks[line - 1]}'"):
        prompt_loader(train, run_of(data, tasks=("math",)), tokenizer, batch_size=2, shuffle=True)


def test_the_only_environment_takes_rows_that_all_name_another_task_with_a_warning(lines, registry, tokenizer, caplog):
    data = named_rows(lines, "typo", None, "typo")
    train, _ = read_data(data, registry)
    loader = prompt_loader(train, run_of(data, tasks=("math",)), tokenizer, batch_size=2, shuffle=True)
    assert {loader.dataset[n]["task_name"] for n in range(3)} == {"math"}
    assert (
        "the rows of jsonl name the task 'typo', which `env` does not have: its only task, 'math', scores them" in caplog.text
    )


def test_rows_without_a_task_belong_to_the_only_environment(lines, registry, tokenizer, caplog):
    data = named_rows(lines, None, "math", None)
    train, _ = read_data(data, registry)
    loader = prompt_loader(train, run_of(data, tasks=("math",)), tokenizer, batch_size=2, shuffle=True)
    assert {loader.dataset[n]["task_name"] for n in range(3)} == {"math"}
    assert "task" not in caplog.text


def test_a_split_holds_the_same_rows_out_of_one_dataset_and_of_a_mixture_and_training_never_sees_them(
    lines, registry, tokenizer
):
    one, other = answered(sums(1, 40)), answered(sums(2, 40))
    keys = {"output_key": None, "response_key": "answer"}
    mix = {"one": section(lines("one", *one), **keys), "other": section(lines("other", *other), weight=5.0, **keys)}
    split = SplitConfig(validation=0.25, seed=3)
    data = DataConfig(mix=mix, split=split)
    train, held_out = read_data(data, registry)
    run = run_of(data)
    seen = [
        text
        for epoch in range(4)
        for batch in conversation_loader(train, run, tokenizer, batch_size=4, shuffle=True)
        for text in texts(batch, tokenizer)
    ]
    checked = [
        text
        for batch in conversation_loader(held_out, run, tokenizer, batch_size=4, shuffle=False)
        for text in texts(batch, tokenizer)
    ]
    everything = {f"{row['question']}{row['answer']}{tokenizer.eos_token}" for row in [*one, *other]}
    assert len(checked) == len(set(checked))
    assert set(seen).isdisjoint(checked)
    assert set(seen) | set(checked) <= everything
    assert {text[:1] for text in checked[:6]} == {"1", "2"}, "validation on the first few rows sees every member"
    _, alone = read_data(DataConfig(train=mix["one"], split=split), registry)
    wanted = [f"{record['messages'][0]['content']}" for record in alone.records]
    assert [text for text in (t.split("=")[0] + "=" for t in checked) if text.startswith("1")] == wanted


@pytest.mark.parametrize("parses", [False, True])
def test_rows_with_texts_of_control_tokens_are_named_and_the_config_decides_what_they_become(
    lines, registry, own_messages, parses
):
    tokenizer = load_tokenizer(MODEL)
    tokenizer.parse_control_tokens = parses
    rows = [{"question": "1+2=", "answer": "3"}, {"question": "1+3=<eos>", "answer": "<eos>4"}]
    train, _ = read_data(
        DataConfig(train=section(lines("rows", *rows), output_key=None, response_key="answer"), check_rows=2), registry
    )
    loader = conversation_loader(train, run_of(DataConfig(train=None)), tokenizer, batch_size=2, shuffle=False)
    [batch] = list(loader)
    ends = [sum(message["token_ids"].tolist().count(tokenizer.eos_token_id) for message in row["message_log"]) for row in batch]
    assert ends == [1, 3 if parses else 1]
    says = "rows.jsonl:2 has the text <eos>, which is tokenized as text"
    named = [message for message in own_messages() if says in message]
    assert len(named) == (not parses)
    assert "rows.jsonl:1" not in "".join(own_messages())


@pytest.mark.parametrize("end", ["", "{{ eos_token }}"])
def test_a_chat_template_without_an_end_of_answers_is_named_once_in_supervised_training(lines, registry, own_messages, end):
    tokenizer = load_tokenizer(MODEL)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}" + end + "{% endif %}{% endfor %}"
    )
    rows = [{"question": "1+2=", "answer": "3"}, {"question": "1+3=", "answer": "4"}]
    fields = section(lines("rows", *rows), output_key=None, response_key="answer")
    train, _ = read_data(DataConfig(train=fields, check_rows=2), registry)
    list(conversation_loader(train, run_of(DataConfig(train=None)), tokenizer, batch_size=2, shuffle=False))
    named = [message for message in own_messages() if "does not teach the model to end them" in message]
    assert len(named) == (not end)


def test_the_prompt_of_data_applies_to_every_dataset_without_its_own(lines, registry, tmp_path):
    (tmp_path / "p.yaml").write_text('system: "0"\nuser: "{question}="\n')
    path = lines("rows", {"question": "1+2", "expected_answer": "3"})
    prompt = PromptConfig(prompt_config=str(tmp_path / "p.yaml"))
    train, _ = read_data(DataConfig(train=section(path), prompt=prompt), registry)
    assert [message["content"] for message in train.records[0]["messages"]] == ["0", "1+2="]
    own = DataConfig(train=section(path, system_prompt="9"), prompt=prompt)
    assert read_data(own, registry)[0].records[0]["messages"][0]["content"] == "9"
    for other in (DatasetConfig(dataset_name="arithmetic"), section(path, record_fn="gsm8k")):
        with pytest.raises(ValidationError, match=r"prompt\.prompt_config applies to all datasets, but train"):
            DataConfig(train=other, prompt=prompt)
    (tmp_path / "e.yaml").write_text("- {question: 5+6, answer: 11}\n")
    few_shot = PromptConfig(prompt_config="generic/default", examples_type=str(tmp_path / "e.yaml"))
    train, _ = read_data(DataConfig(train=section(path), prompt=few_shot), registry)
    assert "Question: 5+6\nAnswer: 11\n\n" in train.records[0]["messages"][-1]["content"]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (("train", "mix"), "mix and train both"),
        (("train", "validation", "split"), "split and validation both"),
        (("weighed",), "weight has no effect"),
    ],
)
def test_conflicting_data_sections_are_errors(tmp_path, keys, says):
    one = section(tmp_path)
    given = {
        "train": {"train": one},
        "validation": {"validation": one},
        "mix": {"mix": {"a": one}},
        "split": {"split": SplitConfig(validation=0.1)},
        "weighed": {"train": section(tmp_path, weight=2.0)},
    }
    with pytest.raises(ValidationError, match=says):
        DataConfig(**{key: value for name in keys for key, value in given[name].items()})


def test_rows_that_cannot_be_tokenized_are_errors_with_location_or_are_skipped_and_counted(lines, registry, tokenizer, caplog):
    rows = [*answered(sums(1, 3)), {"question": "1+2+3+4+5+6+7+8+9=", "answer": "45"}, "{", *answered(sums(2, 3))]
    keys = {"output_key": None, "response_key": "answer"}
    path = lines("rows", *rows)
    data = DataConfig(train=section(path, on_bad_row="skip", **keys))
    with caplog.at_level(logging.WARNING, logger="rlcore"):
        train, _ = read_data(data, registry)
        loader = conversation_loader(train, run_of(data), tokenizer, batch_size=2, shuffle=True)
    assert (len(loader.dataset), train.bad_rows.count) == (6, 2)
    assert "1 bad row of jsonl is skipped" in caplog.text
    assert "rows.jsonl:5: invalid JSON" in caplog.text
    assert "rows.jsonl:4: record 3 has 21 tokens, but 16 are allowed" in caplog.text
    conversation_loader(train, run_of(data), tokenizer, batch_size=2, shuffle=False)
    assert train.bad_rows.count == 2, "a second use of the same rows finds no new ones"
    strict = DataConfig(train=section(lines("rows", *(row for row in rows if row != "{")), **keys))
    train, _ = read_data(strict, registry)
    with pytest.raises(DataError, match=r"jsonl: .*rows\.jsonl:4: record 3 has 21 tokens"):
        conversation_loader(train, run_of(strict), tokenizer, batch_size=7, shuffle=False)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("NaN", "is nan, "),
        ("-Infinity", "is -inf, "),
        ("1e999", "is inf, "),
        ("[1, 2]", r"is \[1, 2\]: an expected answer is a text or a number"),
        ('{"a": 1}', r"is \{'a': 1\}: an expected answer is a text or a number"),
        (r'"\ud83d"', r"has an unpaired surrogate, '\\ud83d', at index 0"),
    ],
)
def test_an_expected_answer_with_which_nothing_can_be_compared_is_refused_with_file_and_line(lines, registry, answer, says):
    path = lines("rows", *sums(1, 2), f'{{"question": "1+1=", "expected_answer": {answer}}}')
    with pytest.raises(DataError, match=rf"rows\.jsonl:3: the field 'expected_answer' \(`output_key`\) {says}"):
        read_data(DataConfig(train=section(path)), registry)


def test_a_text_far_beyond_the_limit_is_refused_or_dropped_without_being_tokenized(lines, registry, tokenizer, monkeypatch):
    monkeypatch.setattr(processors, "_ALWAYS_TOKENIZED", 100)
    rows = [*answered(sums(1, 3)), {"question": "1+" * 1000 + "1=", "answer": "1"}]
    data = DataConfig(train=section(lines("rows", *rows), output_key=None, response_key="answer"), on_long_prompt="drop")
    train, _ = read_data(data, registry)
    for read in (conversation_loader, prompt_loader):
        loader = read(train, run_of(data), tokenizer, batch_size=2, shuffle=False)
        assert [loader.dataset[row]["loss_multiplier"] for row in range(4)] == [1.0, 1.0, 1.0, 0.0]
        assert loader.dataset[3]["length"] <= 16
    strict = data.model_copy(update={"on_long_prompt": "error"})
    with pytest.raises(DataError, match=r"rows\.jsonl:4: record 3 has 2003 characters, too many for the 16 tokens"):
        conversation_loader(train, run_of(strict), tokenizer, batch_size=2, shuffle=False)


def test_rows_that_are_too_long_are_found_before_the_first_step_among_the_rows_that_are_drawn_first(
    lines, registry, tokenizer, caplog
):
    long = {"question": "1+2+3+4+5+6+7+8+9=", "answer": "45"}
    rows = [*answered(sums(1, 40)), long, *answered(sums(2, 30)), long]
    keys = {"output_key": None, "response_key": "answer"}

    def load(most: int, shuffle: bool = False, **more):
        data = DataConfig(train=section(lines("rows", *rows), **keys), check_rows=most, **more)
        train, _ = read_data(data, registry)
        return conversation_loader(train, run_of(data), tokenizer, batch_size=2, shuffle=shuffle)

    with pytest.raises(DataError, match=r"(?s)2 of 72 checked rows.*rows\.jsonl:41, 72: record 40 "):
        load(2000)
    with pytest.raises(DataError, match=r"rows\.jsonl:41: record 40 has 21 tokens, but 16 are allowed"):
        load(41)
    with caplog.at_level(logging.INFO, logger="rlcore"):
        loader = load(40)
        load(72, on_long_prompt="drop")
    assert "checked 40 of 72 rows of jsonl" in caplog.text
    assert "2 of 72 checked rows of jsonl are too long and dropped" in caplog.text
    assert loader.next_ordinal == 0
    shuffled = load(0, shuffle=True).next_rows(72)
    first = min(shuffled.index(40), shuffled.index(71))
    load(first, shuffle=True)
    with pytest.raises(DataError, match="has 21 tokens"):
        load(first + 1, shuffle=True)


def test_all_bad_rows_are_listed_by_cause_with_what_continues_without_them(lines, registry):
    good = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    bad = {3: {"rejected": None}, 7: {"rejected": "2"}, 8: {"rejected": "2"}, 9: {"rejected": "2"}, 12: {"rejected": 5}}
    path = lines("pairs", *(good | bad.get(number, {}) for number in range(1, 20)), "{", good, "[", good)
    config = DataConfig(train=PreferenceDatasetConfig(path=path))
    with pytest.raises(DataError) as caught:
        read_data(config, registry)
    title, *causes, remedy = str(caught.value).splitlines()
    assert title == f"7 of 23 rows of {path} cannot be used:"
    assert [cause.partition(" the ")[0].partition(" both")[0].partition(" invalid")[0] for cause in causes] == [
        f"  {path}:7-9:",
        f"  {path}:20, 22:",
        f"  {path}:3:",
        f"  {path}:12:",
    ]
    assert "both answers are the same" in causes[0]
    assert remedy == "Set `on_bad_row: skip` in the section of the dataset to continue without bad rows"


@pytest.mark.parametrize("skip", [False, True])
def test_rows_that_would_only_train_the_end_of_an_answer_are_bad_rows_of_every_algorithm(lines, registry, tokenizer, skip):
    mode = {"on_bad_row": "skip"} if skip else {}
    answers = section(
        lines("answers", *answered(sums(1, 2)), {"question": "1+1=", "answer": ""}),
        output_key=None,
        response_key="answer",
        **mode,
    )
    pairs = PreferenceDatasetConfig(
        path=lines("pairs", *({"prompt": "1+1=", "chosen": good, "rejected": "3"} for good in ("2", "2", ""))), **mode
    )
    for train, load in ((answers, conversation_loader), (pairs, preference_loader)):
        source, _ = read_data(data := DataConfig(train=train), registry)
        if skip:
            assert len(load(source, run_of(data), tokenizer, batch_size=1, shuffle=True).dataset) == 2
            continue
        with pytest.raises(DataError, match=rf"{train.path.name}:3: .* is empty, so that only its end would be trained"):
            load(source, run_of(data), tokenizer, batch_size=1, shuffle=True)


def test_a_rejected_answer_may_be_empty_if_its_end_is_trained(lines, registry, tokenizer):
    data = DataConfig(train=PreferenceDatasetConfig(path=lines("pairs", {"prompt": "1+1=", "chosen": "2", "rejected": ""})))
    source, _ = read_data(data, registry)
    assert len(preference_loader(source, run_of(data), tokenizer, batch_size=1, shuffle=True).dataset) == 1
    endless = load_tokenizer(MODEL, chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(DataError, match=r"pairs\.jsonl:1: the rejected answer has no token to train on"):
        preference_loader(source, run_of(data), endless, batch_size=1, shuffle=True)


def test_an_epoch_of_records_ends_with_the_rows_that_do_not_fill_a_batch_and_one_of_prompts_says_so(
    lines, registry, tokenizer, caplog
):
    rows = answered(sums(1, 7))
    data = DataConfig(train=section(lines("rows", *rows), output_key="answer", response_key="answer"))
    source, _ = read_data(data, registry)
    with caplog.at_level(logging.INFO, logger="rlcore"):
        batches = [*conversation_loader(source, run_of(data), tokenizer, batch_size=3, shuffle=True)]
        assert not caplog.text
        prompts = [*prompt_loader(source, run_of(data), tokenizer, batch_size=3, shuffle=True)]
    assert [len(batch) for batch in batches] == [3, 3, 1]
    assert sorted(row["idx"] for batch in batches for row in batch) == [*range(7)]
    assert [len(batch) for batch in prompts] == [3, 3]
    assert "each epoch leaves out 1 of the 7 rows of jsonl (different ones each time)" in caplog.text


def test_steps_that_end_before_the_requested_epochs_are_reported(lines, registry, tokenizer, caplog):
    data = DataConfig(train=section(lines("rows", *answered(sums(1, 7))), output_key=None, response_key="answer"))
    for steps in (6, 5):
        run = run_of(data, global_batch_size=3, max_num_steps=steps, max_num_epochs=2)
        source, _ = read_data(data, registry)
        resolved = DataLoaders(run, tokenizer, train=source, validation={}).resolve_steps(run)
        assert resolved.algorithm.max_num_steps == steps
        assert ("the run ends after 5 of the 6 steps of max_num_epochs: 2, so it leaves out rows" in caplog.text) is (
            steps == 5
        )


def test_data_of_another_form_than_the_algorithm_wants_is_refused_before_anything_starts(lines, registry, tokenizer):
    pairs = DataConfig(train=PreferenceDatasetConfig(path=lines("pairs", {"prompt": "1", "chosen": "2", "rejected": "3"})))
    records = DataConfig(train=section(lines("rows", *sums(1, 2))))
    for data, load, says in (
        (pairs, conversation_loader, "use a dataset of conversations, not of preferences"),
        (pairs, prompt_loader, "use a dataset of prompts, not of preferences"),
        (records, preference_loader, "use a dataset of preferences"),
        (records, conversation_loader, r"rows\.jsonl:1: record 0 has messages of \['user'\], none of \['assistant'\]"),
    ):
        with pytest.raises(DataError, match=says):
            load(read_data(data, registry)[0], run_of(data), tokenizer, batch_size=1, shuffle=False)


def last_token_only(record, **given):
    datum = conversation_datum(record, **given)
    for message in datum["message_log"]:
        message["token_loss_mask"][:-1] = 0.0
    return datum


def maskless(record, **given):
    datum = conversation_datum(record, **given)
    for message in datum["message_log"]:
        del message["token_loss_mask"]
    return datum


def test_results_of_a_custom_processor_are_checked(lines, registry, tokenizer, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    path = lines("rows", *answered(sums(1, 2)))

    def loader(name: str):
        data = DataConfig(train=section(path, output_key=None, response_key="answer", processor=f"test_read_data.{name}"))
        return conversation_loader(read_data(data, registry)[0], run_of(data), tokenizer, batch_size=2, shuffle=False)

    batch = next(iter(loader("last_token_only")))
    assert [float(torch.cat([m["token_loss_mask"] for m in row["message_log"]]).sum()) for row in batch] == [1.0, 1.0]
    with pytest.raises(DataError, match="returned a message of 'user' without token_loss_mask"):
        loader("maskless")
    with pytest.raises(DataError, match=r"returned \{.*expected a DatumSpec| without "):
        loader("answered_rows")
    with pytest.raises(ConfigError, match="has no 'absent'"):
        loader("absent")


def answered_rows(record, **given):
    return dict(record)


def test_a_source_from_python_needs_no_config(tokenizer):
    records = [{"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}]
    source = Source(records=records, name="mine")
    loader = conversation_loader(source, run_of(DataConfig()), tokenizer, batch_size=1, shuffle=False)
    assert texts(next(iter(loader)), tokenizer) == [f"1+1=2{tokenizer.eos_token}"]


@pytest.mark.parametrize("form", ["one dataset", "a share of it", "a mixture"])
def test_a_resume_needs_the_same_rows_in_the_same_order_in_any_file(form, lines, registry, tokenizer):
    rows = answered(sums(1, 20))
    keys = {"output_key": None, "response_key": "answer"}

    def loader(*given):
        one = section(lines(f"rows{len(list(lines('x').parent.iterdir()))}", *given), **keys)
        named = {"mix": {"one": one, "other": section(lines("other", *answered(sums(2, 5))), **keys)}}
        data = DataConfig(
            **(named if form == "a mixture" else {"train": one}), split=SplitConfig(validation=0.3) if "share" in form else None
        )
        return conversation_loader(read_data(data, registry)[0], run_of(data), tokenizer, batch_size=2, shuffle=True)

    written = loader(*rows)
    next(iter(written))
    state = json.loads(json.dumps(written.state_dict()))
    again = loader(*rows)
    again.load_state_dict(state)
    assert texts(next(iter(again)), tokenizer) == texts(next(iter(written)), tokenizer)
    for other in (rows[::-1], [*rows[:-1], {**rows[-1], "answer": "99"}]):
        with pytest.raises(DataError, match="the rows differ from those of the state"):
            loader(*other).load_state_dict(state)


def test_a_dataset_of_which_every_row_is_dropped_is_refused_and_one_kept_row_is_enough(lines, registry, tokenizer):
    long = [{"question": "1+" * 20, "answer": str(n)} for n in range(5)]
    for rows in (long, [*long, *answered(sums(1, 1))]):
        path = lines("rows", *rows)
        data = DataConfig(train=section(path, output_key=None, response_key="answer"), on_long_prompt="drop")
        source, _ = read_data(data, registry)
        if rows is not long:
            assert len(conversation_loader(source, run_of(data), tokenizer, batch_size=2, shuffle=True)) == 3
            continue
        with pytest.raises(DataError, match="all 5 records of jsonl are dropped: each has more than 16 tokens"):
            conversation_loader(source, run_of(data), tokenizer, batch_size=2, shuffle=True)


def test_template_errors_of_later_rows_are_reported_before_the_first_step(lines, registry, tokenizer):
    from copy import deepcopy

    strict = deepcopy(tokenizer)
    strict.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    said = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    rows = [{"messages": said}] * 5 + [{"messages": [{"role": "system", "content": "0"}, *said]}]
    for split in (None, SplitConfig(validation=0.5)):
        numbered = [
            {"messages": [*row["messages"][:-2], {**said[0], "content": f"{n}+1="}, said[1]]} for n, row in enumerate(rows)
        ]
        data = DataConfig(train=section(lines("rows", *numbered), input_key="messages", output_key=None), split=split)
        sides = [side for side in read_data(data, registry) if side is not None]
        with pytest.raises(DataError, match=r"rows\.jsonl:6: the chat template cannot render .*no system message"):
            [conversation_loader(side, run_of(data), strict, batch_size=1, shuffle=False) for side in sides]


def test_an_evaluation_asks_what_a_split_holds_out_and_an_examination_what_it_leaves(lines, tmp_path, registry):
    mix = {
        name: {"dataset_name": "jsonl", "path": str(lines(name, *sums(first, 30))), "task_name": "arithmetic"}
        for first, name in ((1, "one"), (2, "two"))
    }
    config = {
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2},
        "policy": {
            "backend": "hf",
            "model_name": str(MODEL),
            "max_total_sequence_length": 16,
            "generation": {"backend": "hf", "max_new_tokens": 4},
        },
        "data": {"mix": mix, "split": {"validation": 0.3}},
        "env": {"arithmetic": {}},
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(config))
    train, held_out = read_data(load_config(path, registry=registry).run.data, registry)
    plan = plan_evaluation(path)
    assert plan.dataset_name == "mix of one, two"
    assert len(plan.prompts.dataset) == len(held_out.records)
    asked = {question[0]["content"] for question in plan_policy_and_engine(path, num_prompts=20).prompts.questions}
    assert asked <= {record["messages"][0]["content"] for record in train.records}
    assert len(asked) == 20


@pytest.mark.parametrize(
    ("question", "fraction", "warned"),
    # The tokenizer has digits, signs and `=`, one token per character; the answer and the end token are in its vocabulary.
    [("12+3=", 0.0, False), ("Is12+3=", 2 / 9, True)],
)
def test_the_fraction_of_unknown_tokens_is_a_metric_and_a_warning(
    lines, registry, tokenizer, caplog, question, fraction, warned
):
    data = DataConfig(
        train=section(lines("sums", *[{"question": question, "answer": "7"}] * 4), output_key=None, response_key="answer")
    )
    train, _ = read_data(data, registry)
    with caplog.at_level(logging.INFO, logger="rlcore"):
        loaders = DataLoaders(run_of(data, global_batch_size=2), tokenizer, train=train, validation={})
    assert loaders.unknown_fraction == pytest.approx(fraction)
    levels = {record.levelname: record.getMessage() for record in caplog.records if record.name == "rlcore"}
    assert f"{100 * fraction:.2f} % of the tokens of the first 4 training rows are unknown" in levels["INFO"]
    assert ("WARNING" in levels) is warned
    if warned:
        assert "are <unk>" in levels["WARNING"]
        assert repr(question) in levels["WARNING"]


def test_one_row_is_not_counted_among_the_first_rows(lines, registry, tokenizer, caplog):
    data = DataConfig(
        train=section(lines("sums", {"question": "Is12+3=", "answer": "7"}), output_key=None, response_key="answer")
    )
    train, _ = read_data(data, registry)
    with caplog.at_level(logging.WARNING, logger="rlcore"):
        DataLoaders(run_of(data, global_batch_size=1), tokenizer, train=train, validation={})
    assert " of the tokens of the first training row are <unk>" in caplog.text


@pytest.mark.parametrize("split", [None, SplitConfig(validation=0.5)])
def test_prompts_of_messages_are_recognized_also_among_held_out_rows(lines, registry, split):
    talks = lines("talks", *({"prompt": [{"role": "user", "content": f"{n}"}], "answer": "1"} for n in range(20)))
    keys = {"input_key": "prompt", "output_key": "answer"}
    for path, expected in ((section(talks, **keys), True), (section(lines("sums", *sums(1, 20))), False)):
        sources = read_data(DataConfig(train=path, split=split), registry)
        assert [is_conversational(source.records) for source in sources if source] == [expected] * (1 + (split is not None))


@pytest.mark.parametrize(
    ("key", "keys", "prefill", "warned"),
    [
        ("prompt", {}, "2", False),
        ("prompt", {"continue_final_message": False}, None, False),
        ("messages", {}, None, True),
        ("messages", {"continue_final_message": True}, "2", False),
        ("messages", {"continue_final_message": False}, None, False),
    ],
)
def test_a_final_message_of_the_assistant_is_continued_or_left_out_as_configured_and_never_silently(
    lines, registry, tokenizer, caplog, key, keys, prefill, warned
):
    row = {key: [{"role": "user", "content": "9+12="}, {"role": "assistant", "content": "2"}], "answer": "21"}
    data = DataConfig(train=section(lines("rows", row), input_key=key, output_key="answer", **keys))
    run = run_of(data).model_copy(update={"algorithm": GRPOConfig(num_prompts_per_step=1), "algorithm_name": "grpo"})
    source, _ = read_data(data, registry)
    [[datum]] = prompt_loader(source, run, tokenizer, batch_size=1, shuffle=False)
    assert datum.get("prefill") == prefill
    text = texts([datum], tokenizer)[0]
    assert text.endswith("9+12=2" if prefill else "9+12=")
    assert ("end with a message of the assistant, which is left out" in caplog.text) is warned
    [[trained]] = conversation_loader(source, run_of(data), tokenizer, batch_size=1, shuffle=False)
    assert sum(int(message["token_loss_mask"].sum()) for message in trained["message_log"]) == 2, "the answer and its end"


def test_an_answer_before_a_begun_one_belongs_to_the_prompt(lines, registry, tokenizer):
    said = [{"role": role, "content": text} for role, text in (("user", "9+12="), ("assistant", "3"), ("assistant", "2"))]
    data = DataConfig(train=section(lines("rows", {"prompt": said, "answer": "21"}), input_key="prompt", output_key="answer"))
    run = run_of(data).model_copy(update={"algorithm": GRPOConfig(num_prompts_per_step=1), "algorithm_name": "grpo"})
    source, _ = read_data(data, registry)
    [[datum]] = prompt_loader(source, run, tokenizer, batch_size=1, shuffle=False)
    assert [message["content"] for message in datum["message_log"]] == ["9+12=", "3"]
    assert datum["prefill"] == "2"
