"""Reads a data file in any of the usual formats, and recognizes what its rows are.

Formats that no dataset reads are converted to JSON Lines. Rows are recognized by the names and values of their fields; a few
bad rows do not matter.
"""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import ConfigError, DataError
from rl_train.data.benchmarks import LAYOUTS, nearest_layout
from rl_train.data.image_sources import IMAGE_FIELDS
from rl_train.data.records import field_value

if TYPE_CHECKING:
    from rl_train.data.records import BadRow

_TABLES = {".csv": ",;\t|", ".tsv": "\t,;|"}
"""Separators that are tried, by file extension; the first is the usual one."""
SKIP_BAD_ROWS = "With `--skip-bad-rows`, `rlcore init` continues without them"


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """The rows of a file, and the dataset that reads it."""

    path: Path
    dataset: str
    """`jsonl` or `parquet`."""
    rows: Sequence[dict[str, Any]]
    locations: Sequence[str] = ()
    """Location of each row, if the file must be converted to JSON Lines because no dataset reads it."""
    bad: Sequence[BadRow] = ()
    """Rows that cannot be read; their dataset reports those of a file that is not converted."""

    @property
    def converted(self) -> bool:
        """Whether the rows must be written as JSON Lines first."""
        return bool(self.locations)


def read_data_file(path: Path, *, skip_bad_rows: bool = False) -> DataFile:
    """The rows of a JSON Lines, JSON, Parquet, CSV or TSV file.

    The values of CSV and TSV files stay texts, so that `007` is not read as 7.

    Raises:
        DataError: The file does not exist, is in none of these formats, or has no valid row.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"{path} {what}: give a JSON Lines, JSON, Parquet, CSV or TSV file")
    if path.suffix.lower() in _TABLES:
        data = _table(path)
    elif path.suffix.lower() == ".parquet":
        from rl_train.data.arrow_rows import parquet_rows

        table = parquet_rows(path)
        data = DataFile(path=path, dataset="parquet", rows=[table[number] for number in range(len(table))])
    elif (array := _json_array(path)) is not None:
        locations = [f"{path}, row {number}" for number in range(1, len(array) + 1)]
        rows = [_with_absolute_images(row, path.parent) for row in array]
        data = DataFile(path=path, dataset="jsonl", rows=rows, locations=locations)
    else:
        data = DataFile(path=path, dataset="jsonl", rows=_json_lines(path))
    if data.bad and not (skip_bad_rows and data.rows):
        from rl_train.data.records import BadRowsError

        total = len(data.rows) + len(data.bad)
        raise BadRowsError(data.bad, total=total, rows_of=f"{total} rows of {path}", remedy=SKIP_BAD_ROWS)
    if not data.rows:
        raise DataError(f'{path} has no rows: add at least one, such as {{"question": "2+2=", "answer": "4"}}')
    return data


def _json_lines(path: Path) -> list[dict[str, Any]]:
    from rl_train.data.rows import JsonLines

    lines, rows = JsonLines(path), []
    for number in range(len(lines)):
        try:
            rows.append(lines[number])
        except DataError as error:  # the dataset reports it with the other bad rows, unless all are
            if number + 1 == len(lines) and not rows:
                raise DataError(f"{lines.row_location(number)}: {error}") from error
    return rows


def _json_array(path: Path) -> list[dict[str, Any]] | None:
    """The objects of a file that is one JSON array; None for any other file."""
    from rl_train.data.rows import read_json

    with path.open("rb") as file:
        if not file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            return None
    try:
        rows = read_json(path.read_text(encoding="utf-8-sig"))
    except (DataError, ValueError) as error:
        raise DataError(f"{path} is invalid JSON: {error}") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise DataError(f"{path}: element {number} is a {type(row).__name__}, but an object with fields is expected")
    return list(rows)


def _table(path: Path) -> DataFile:
    """The rows of a CSV or TSV file; those with another number of values than there are columns are bad."""
    from rl_train.data.records import BadRow

    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            separators = _TABLES[path.suffix.lower()]
            reader = csv.reader(file, delimiter=max(separators, key=lambda each: len(_split(first, each))), strict=True)
            header = next(reader, [])
            if len(set(header)) < len(header) or "" in header:
                raise DataError(f"{path}:1: the first line must name each column once, but it is {header}")
            rows, bad = {}, []
            for values in reader:
                location = f"{path}:{reader.line_num}"
                if len(values) == len(header):
                    rows[location] = dict(zip(header, values, strict=True))
                elif values:
                    reason = f"{len(values)} values, but the file has {len(header)} columns ({', '.join(header)})"
                    bad.append(BadRow(location=location, reason=reason, cause=reason))
            found = [_with_absolute_images(row, path.parent) for row in rows.values()]
            return DataFile(path=path, dataset="jsonl", rows=found, locations=[*rows], bad=bad)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}. Save it as UTF-8") from error


def _split(line: str, separator: str) -> list[str]:
    return next(csv.reader([line], delimiter=separator), [])


def json_lines_text(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as JSON Lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


Row = Mapping[str, Any]
_QUESTIONS = ("question", "problem", "prompt", "query", "instruction", "input", "Question", "Problem")
ANSWERS = ("expected_answer", "answer", "final_answer", "ground_truth", "solution", "target", "label", "Answer")
_RESPONSES = ("response", "completion", "output")
_RECOGNIZED = 1000
"""Most rows that are tried with each layout of benchmarks."""
_LONGEST_PATH = 1024
"""Longer texts are not paths; they may be `data:` URLs."""
SAMPLING, SUPERVISED, PAIRS = ("grpo", "sft"), ("sft",), ("dpo", "rm", "kto")


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """What a row is, and how a dataset reads it."""

    name: str
    algorithms: tuple[str, ...]
    """Algorithms that can train on such rows; the first is the default."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the dataset's section that differ from their defaults."""
    answer_key: str | None = None
    """Field with the expected answer; None if rows have none."""
    response_key: str | None = None
    """Field with a response to imitate, for supervised training; None if it is part of the conversation."""
    environment: str | None = None
    """Environment that grades the answers; None if their values decide."""

    @property
    def question_key(self) -> str:
        """Field with the question or prompt."""
        return str(self.keys.get("input_key") or "question")


def recognize(rows: Sequence[Row], path: str) -> RowFormat:
    """The format that most rows have.

    Args:
        rows: The rows of a file; at least one.
        path: Name of the file in errors.

    Raises:
        DataError: The fields fit no format, or one that no algorithm trains on. The message says which options name the fields.
    """
    try:
        found = next(filter(None, (recognized(rows) for recognized in _FORMATS)), None)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    if found is not None:
        return replace(found, name=f"{found.name}, with images") if _most(rows, _has_images) else found
    nearest = f"{near[1]}. " if (near := nearest_layout(rows[0])) else ""
    fields = "\n".join(f"  {name}: {kind}" for name, kind in sorted(_kinds(rows).items()))
    raise DataError(
        f"{path}: the rows have no known format. Their fields:\n{fields}\n"
        "Known formats: a question with an answer or a response, `prompt`, `messages`, ShareGPT (`conversations`), Alpaca "
        "(`instruction`, `output`), verl (`prompt`, `reward_model`), `chosen` with `rejected`, `completion` with `label`, and "
        f"public benchmarks ({', '.join(layout.title for layout in LAYOUTS.values())}). {nearest}"
        "Name the fields yourself: --question FIELD and, if the rows have it, --answer FIELD (what a reward compares with) or "
        "--response FIELD (what the model should write); for preference pairs --question FIELD, --chosen FIELD and --rejected "
        "FIELD; for answers with a label --question FIELD, --response FIELD and --label FIELD." + _proposal(rows, path)
    )


def _proposal(rows: Sequence[Row], path: str) -> str:
    """A command with the longest texts as questions and the field with the fewest values as answers; empty without texts."""
    pair = [name for name in ("chosen", "rejected") if _most_have(rows, name, str)]
    texts = [name for name in rows[0] if name not in pair and _most_have(rows, name, str)]
    if not texts:
        return ""
    question = max(texts, key=lambda name: sum(len(str(row.get(name))) for row in rows))
    values = {name: len({str(row.get(name)) for row in rows}) for name in texts if name != question}
    answer = ["--answer", min(values, key=values.__getitem__)] if values else []
    fields = ["--question", question, *(["--chosen", "chosen", "--rejected", "rejected"] if len(pair) == 2 else answer)]
    return f"\nFor example: {shlex.join(['rlcore', 'init', path, *fields])}"


def named_fields(
    rows: Sequence[Row],
    path: str,
    *,
    question: str | None,
    answer: str | None,
    response: str | None,
    chosen: str | None,
    rejected: str | None,
    label: str | None,
) -> RowFormat | None:
    """The format of rows whose fields the user names; None if no field is named.

    Raises:
        DataError: No row has one of the fields.
        ConfigError: These fields do not make up a format.
    """
    for name in filter(None, (question, answer, response, chosen, rejected, label)):
        if all(field_value(row, name) is None for row in rows):
            raise DataError(f"{path}: no row has a field {name!r}; row 1 has {sorted(rows[0])}")
    if chosen or rejected:
        if not chosen or not rejected or answer or response or label:
            raise ConfigError("Preference pairs need --chosen and --rejected, without --answer, --response and --label.")
        if (pairs := _pairs(rows, chosen=chosen, rejected=rejected, question=question)) is None:
            raise ConfigError(
                f"{path}: {chosen!r} and {rejected!r} must be texts, with the prompt in a field that --question names, or "
                "lists of messages."
            )
        return pairs
    if label:
        if not question or not response or answer:
            raise ConfigError("Answers with a label need --question, --response and --label, without --answer.")
        return _labelled(question, response, label)
    if question is None and (answer or response):
        raise ConfigError("--answer and --response need --question: name the field with the question as well.")
    return None if question is None else _question_format(question, answer, response)


def _question_format(question: str, answer: str | None, response: str | None) -> RowFormat:
    keys: dict[str, Any] = {} if question == "question" else {"input_key": question}
    if response is not None and answer is None:
        return RowFormat(
            name=f"a question ({question}) and a response ({response})",
            algorithms=SUPERVISED,
            keys={**keys, "response_key": response, "output_key": None},
            response_key=response,
        )
    if answer is None:
        return RowFormat(name=f"a prompt ({question})", algorithms=("grpo",), keys={**keys, "output_key": None})
    return RowFormat(
        name=f"a question ({question}) and an answer ({answer})",
        algorithms=SAMPLING,
        keys={**keys, **({} if answer == "expected_answer" else {"output_key": answer})},
        answer_key=answer,
        response_key=response or answer,
    )


def _pairs(
    rows: Sequence[Row], *, chosen: str = "chosen", rejected: str = "rejected", question: str | None = None
) -> RowFormat | None:
    if not _most_have(rows, chosen, str, list) or not _most_have(rows, rejected, str, list):
        return None
    prompt = question or next((name for name in _QUESTIONS if _most_have(rows, name, str, list)), None)
    if prompt is None and not _most_have(rows, chosen, list):
        return None  # without a prompt, both must be whole conversations
    keys = {"prompt_key": prompt or "prompt", "chosen_key": chosen, "rejected_key": rejected}
    return RowFormat(
        name="a prompt with a chosen and a rejected answer",
        algorithms=PAIRS,
        keys={key: name for key, name in keys.items() if key != f"{name}_key"},
    )


def _labelled(prompt: str, completion: str, label: str) -> RowFormat:
    keys = {"prompt_key": prompt, "completion_key": completion}
    named = {key: name for key, name in keys.items() if key != f"{name}_key"} | {"label_key": label}
    return RowFormat(name=f"a prompt with an answer ({completion}) and a label ({label})", algorithms=("kto",), keys=named)


def _sharegpt(rows: Sequence[Row]) -> RowFormat | None:
    if not _most_have(rows, "conversations", list):
        return None
    return RowFormat(name="a ShareGPT conversation", algorithms=SUPERVISED, keys={"record_fn": "sharegpt"})


def _messages(rows: Sequence[Row]) -> RowFormat | None:
    talks = [row["messages"] for row in rows if _is_conversation(row.get("messages"))]
    if 2 * len(talks) <= len(rows):
        return None
    answer = _answer_field(rows)
    ends = 2 * sum(talk[-1]["role"] == "assistant" for talk in talks) > len(talks)
    if answer is None and not ends:
        return RowFormat(
            name="a prompt of several messages", algorithms=("grpo",), keys={"input_key": "messages", "output_key": None}
        )
    expected: dict[str, Any] = {} if answer == "expected_answer" else {"output_key": answer}
    if answer is not None and ends:
        expected["continue_final_message"] = False
    algorithms = (*(("grpo",) if answer else ()), *(("sft",) if ends else ()))
    name = "a conversation" if answer is None else f"a conversation with an answer ({answer})"
    return RowFormat(name=name, algorithms=algorithms, keys={"input_key": "messages", **expected}, answer_key=answer)


def _alpaca(rows: Sequence[Row]) -> RowFormat | None:
    if not _most_have(rows, "instruction", str) or not _most_have(rows, "output", str):
        return None
    return RowFormat(name="an Alpaca instruction with its output", algorithms=SUPERVISED, keys={"record_fn": "alpaca"})


def _gsm8k(rows: Sequence[Row]) -> RowFormat | None:
    if not _most_have(rows, "question", str) or not _most(rows, lambda row: "####" in str(row.get("answer"))):
        return None
    keys, name = {"record_fn": "gsm8k"}, "a GSM8K problem (the number after ####)"
    return RowFormat(name=name, algorithms=SAMPLING, keys=keys, answer_key="answer", environment="math")


def _benchmark(rows: Sequence[Row]) -> RowFormat | None:
    """A layout of benchmarks that reads most rows.

    Raises:
        DataError: They have fields of one that cannot read them, which a question alone would leave out.
    """
    first = rows[:_RECOGNIZED]
    for name, layout in LAYOUTS.items():
        if _most(first, layout.reads):
            answer = None if layout.environment == "code" else "expected_answer"
            keys, title = {"record_fn": name}, f"a row in the layout of {layout.title}"
            return RowFormat(name=title, algorithms=("grpo",), keys=keys, answer_key=answer, environment=layout.environment)
    row = rows[0]
    ignored = {name for name in row if row[name] is not None} - {*_QUESTIONS, *ANSWERS, *_RESPONSES}
    near = nearest_layout(row)
    if near and (near[0] == "multiple_choice" or _answer_field(rows) is None) and ignored & {*sum(LAYOUTS[near[0]].fields, ())}:
        raise DataError(f"{near[1]}. To use only a question, or with an answer, name the fields: --question and --answer.")
    return None


def _questions(rows: Sequence[Row]) -> RowFormat | None:
    question = next((name for name in _QUESTIONS if _most_have(rows, name, str, list)), None)
    if question is None:
        return None
    answer = _answer_field(rows)
    response = next((name for name in _RESPONSES if _most_have(rows, name, str, list)), None)
    if question == "problem" and answer == "answer" and all(_most_have(rows, name, str, int) for name in ("subject", "level")):
        return replace(_question_format(question, answer, None), name="a problem of MATH", environment="math")
    labels = ("true", "false", "1", "0") if answer == "label" else ("true", "false")
    if response and answer and _most(rows, lambda row: str(row.get(answer)).lower() in labels):
        if answer == "label":
            return _labelled(question, response, answer)
        raise DataError(
            f"each row has {question}, {response} and {answer}, which is true or false. If {answer} says whether {response} is "
            f"good: --question {question} --response {response} --label {answer}. If it is the correct answer: --question "
            f"{question} --answer {answer}"
        )
    return _question_format(question, answer, response)


def _verl(rows: Sequence[Row]) -> RowFormat | None:
    if not _most(rows, lambda row: isinstance(row.get("reward_model"), Mapping)) or not _most_have(rows, "prompt", str, list):
        return None
    answer = "reward_model.ground_truth"
    is_text = _most_have(rows, answer, str, int, float)
    passed = [name for name in ("data_source", "extra_info", *(() if is_text else (answer,))) if _most_have(rows, name, object)]
    return RowFormat(
        name=f"a verl prompt with an answer ({answer})",
        algorithms=("grpo",),
        keys={"input_key": "prompt", "output_key": answer if is_text else None, "env_keys": passed},
        answer_key=answer if is_text else None,
    )


_FORMATS: tuple[Callable[[Sequence[Row]], RowFormat | None], ...] = (
    _pairs,
    _verl,
    _sharegpt,
    _messages,
    _alpaca,
    _gsm8k,
    _benchmark,
    _questions,
)
"""In the order in which they are tried: a later format may accept the rows of an earlier one."""


def expected_answers(rows: Sequence[Row], form: RowFormat) -> list[Any]:
    """The answers that completions are compared with; without those of rows that have none."""
    key, layout = form.answer_key, LAYOUTS.get(str(form.keys.get("record_fn")))
    if layout is not None:
        rows, key = [layout.record(row)["extra_env_info"] for row in rows if layout.reads(row)], "expected_answer"
    values = [] if key is None else [field_value(row, key) for row in rows]
    return [value for value in values if value is not None and str(value).strip()]


def has_text_prompts(rows: Sequence[Row], form: RowFormat) -> bool:
    """Whether prompts are a field with text, which a prompt config can contain."""
    return "record_fn" not in form.keys and _most_have(rows, form.question_key, str)


def prompts_ask_for_box(rows: Sequence[Row], form: RowFormat) -> bool:
    """Whether most prompts ask for the answer in a box."""
    return _most(rows, lambda row: "\\boxed" in str(field_value(row, form.question_key)))


def has_system_messages(rows: Sequence[Row], form: RowFormat) -> bool:
    """Whether the messages of a row begin with a system message."""
    prompts = [field_value(row, form.question_key) for row in rows]
    firsts = [prompt[0] for prompt in prompts if isinstance(prompt, list) and prompt]
    return any(isinstance(first, Mapping) and first.get("role") in ("system", "developer") for first in firsts)


def _answer_field(rows: Sequence[Row]) -> str | None:
    """The field with the expected answers: preferably in all rows, else in most."""
    named = [name for name in ANSWERS if _most_have(rows, name, str, int, float)]
    return min(named, key=lambda name: any(row.get(name) in (None, "") for row in rows), default=None)


def _most_have(rows: Sequence[Row], name: str, *kinds: type) -> bool:
    """Whether most rows have a value of one of these types, which is not empty."""
    return _most(rows, lambda row: isinstance(value := field_value(row, name), kinds) and value not in (None, ""))


def _most(rows: Sequence[Row], is_so: Callable[[Row], bool]) -> bool:
    return 2 * sum(map(is_so, rows)) > len(rows)


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, Mapping) and "role" in each for each in value)


def _has_images(row: Row) -> bool:
    """Whether a row has images in its own field or in messages."""
    talks = [value for value in row.values() if _is_conversation(value)]
    contents = [message["content"] for talk in talks for message in talk if isinstance(message.get("content"), list)]
    kinds = {part.get("type") for content in contents for part in content if isinstance(part, Mapping)}
    return any(row.get(key) for key in IMAGE_FIELDS) or not kinds.isdisjoint(("image", "image_url"))


def _with_absolute_images(value: Any, folder: Path, *, is_image: bool = False) -> Any:
    """A row whose images have absolute paths, because the converted rows are in another folder."""
    if isinstance(value, Mapping):
        is_part = is_image or value.get("type") in ("image", "image_url")
        names = (*IMAGE_FIELDS, "path", "url", "image_url") if is_part else IMAGE_FIELDS
        return {key: _with_absolute_images(each, folder, is_image=key in names) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_absolute_images(each, folder, is_image=is_image) for each in value]
    is_file = is_image and isinstance(value, str) and len(value) < _LONGEST_PATH and (folder / value).is_file()
    return str((folder / value).resolve()) if is_file else value


def _kinds(rows: Sequence[Row]) -> dict[str, str]:
    """The types of each field, and in how many rows it is missing."""
    kinds: dict[str, str] = {}
    for name in {key for row in rows for key in row}:
        types = sorted({type(row[name]).__name__ for row in rows if name in row})
        missing = sum(name not in row for row in rows)
        kinds[name] = " or ".join(types) + (f", missing in {missing} of {len(rows)} rows" if missing else "")
    return kinds
