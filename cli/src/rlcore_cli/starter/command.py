"""`rlcore init`: writes a config, and for algorithms that sample a reward function, from a data file."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_core.errors import ConfigError, DataError
from rlcore_cli.arguments import Tokenizer, counted

if TYPE_CHECKING:
    from rl_core.plugins.registry import Registry
    from rlcore_cli.starter.config_values import Hardware, Starter
    from rlcore_cli.starter.data_file import DataFile, RowFormat

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_MEASURED = 1000
_OUTLIER = 2
"""The longest row is reported if it is more than this many times as long as the next one."""
_CONFIG = "config.yaml"


def _field_option(what: str) -> Any:
    return typer.Option(metavar="FIELD", help=f"Field with {what}.", show_default=False)


def init(
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="JSON Lines, JSON, Parquet, CSV or TSV file.", show_default=False)
    ],
    model: Annotated[
        str, typer.Option("--model", help="A model folder, a GGUF file, or a name on the hub.", show_default=True)
    ] = DEFAULT_MODEL,
    tokenizer: Tokenizer = None,
    algorithm: Annotated[
        str | None,
        typer.Option("--algorithm", help="grpo, sft, dpo, kto or rm; by default what fits the rows.", show_default=False),
    ] = None,
    validation: Annotated[
        Path | None,
        typer.Option("--validation", metavar="FILE", help="Validation data; by default a share of DATA.", show_default=False),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder of the new files.")] = Path(),
    question: Annotated[str | None, _field_option("the question or prompt")] = None,
    answer: Annotated[str | None, _field_option("the expected answer")] = None,
    response: Annotated[str | None, _field_option("a response to imitate")] = None,
    chosen: Annotated[str | None, _field_option("the better answer of a pair")] = None,
    rejected: Annotated[str | None, _field_option("the worse answer of a pair")] = None,
    label: Annotated[str | None, _field_option("the label of a response: good (true, 1) or bad (false, 0)")] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="[[NODES x] GPUS x] SIZE",
            help="Fit the config to GPUs, such as 24GiB, 8x80GiB or 2x8x80GiB; computed, not run on them.",
            show_default=False,
        ),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Chat template to use instead of the model's.", exists=True, dir_okay=False),
    ] = None,
    skip_bad_rows: Annotated[bool, typer.Option("--skip-bad-rows", help="Skip rows that cannot be used.")] = False,
    own_reward: Annotated[
        bool, typer.Option("--own-reward", help="Write a reward function even if `math` can grade the answers.")
    ] = False,
) -> None:
    """Write a config for a data file, and a reward function with a test if the algorithm needs one.

    Recognizes questions with answers or responses, prompts, messages, ShareGPT, Alpaca, verl, GSM8K and other benchmarks,
    preference pairs and answers with a label. A field within another is named with a dot: reward_model.ground_truth. Lengths
    are set from the tokens of the rows. Existing files are never overwritten. The run is named after the new folder, or
    without --output after the data file.

    Example:
        rlcore init questions.jsonl --model path/to/model
        rlcore init conversations.parquet --output chat
        rlcore init table.csv --question Frage --answer Antwort
        rlcore init pairs.jsonl --question query --chosen better --rejected worse --skip-bad-rows
        rlcore init questions.jsonl --model path/to/model --gpus 8x80GiB
    """
    from rl_core.config.section import model_path_problem
    from rl_core.data.hub import require_model
    from rl_core.plugins.manager import discover
    from rl_core.plugins.registry import Registry
    from rl_train.data.records import BadRowsError
    from rlcore_cli.starter.config_values import parse_hardware
    from rlcore_cli.starter.data_file import SKIP_BAD_ROWS, named_fields, read_data_file, recognize

    hardware = None if gpus is None else parse_hardware(gpus)
    train = read_data_file(data, skip_bad_rows=skip_bad_rows)
    held_out = None if validation is None else read_data_file(validation, skip_bad_rows=skip_bad_rows)
    fields = {"question": question, "answer": answer, "response": response, "chosen": chosen, "rejected": rejected}
    named = named_fields(train.rows, str(data), **fields, label=label)
    form = named or recognize(train.rows, str(data))
    algorithm = _algorithm(algorithm, form, data)
    _reject_existing([_CONFIG], output)
    require_model(model)
    if (problem := model_path_problem(model)) is not None:
        raise ConfigError(f"--model: {problem}")
    print(f"measuring the rows with the tokenizer {tokenizer or f'of {model}'}", file=sys.stderr)
    registry = Registry(discover())
    graders = frozenset() if own_reward else frozenset(registry.names("environment"))
    starter = replace(
        _starter(train, held_out, form, model=model, algorithm=algorithm, output=output, graders=graders),
        tokenizer=tokenizer,
        chat_template=None if chat_template is None else str(chat_template.resolve()),
        skips_bad_rows=skip_bad_rows,
    )
    try:
        starter = _measured(starter, train, held_out, model=model, registry=registry)
    except BadRowsError as error:
        rows = [replace(row, location=_in_given_file(row.location, train, held_out)) for row in error.rows]
        listed = BadRowsError(rows, total=error.total, rows_of=f"{error.total} rows", remedy=SKIP_BAD_ROWS)
        if chat_template is not None or not any("chat template" in row.reason for row in rows):
            raise listed from error
        raise DataError(f"{listed}. `--chat-template FILE` uses another chat template than the model's.") from error
    if chat_template is not None:
        starter = replace(starter, chat_template=_from_folder(str(chat_template), output))
    if tokenizer is not None and Path(tokenizer).exists():
        starter = replace(starter, tokenizer=_from_folder(tokenizer, output))
    files = _files(starter, train, held_out, model=model, hardware=hardware, registry=registry)
    _write(files, output)
    _report(starter, form, train, held_out, files, output)


def _algorithm(algorithm: str | None, form: RowFormat, data: Path) -> str:
    if algorithm is None:
        return form.algorithms[0]
    if algorithm not in form.algorithms:
        raise ConfigError(
            f"Each row of {data} is {form.name}: --algorithm must be {' or '.join(form.algorithms)}, not {algorithm}. "
            "docs/algorithms/index.md leads to configs of the other algorithms."
        )
    return algorithm


def _starter(
    train: DataFile,
    validation: DataFile | None,
    form: RowFormat,
    *,
    model: str,
    algorithm: str,
    output: Path,
    graders: Collection[str],
) -> Starter:
    """What the config is made from, as far as it follows from the options and the rows; `graders` are the environments."""
    from rlcore_cli.starter.config_values import Starter, are_mathematical
    from rlcore_cli.starter.data_file import expected_answers, has_system_messages, has_text_prompts, prompts_ask_for_box

    grader = form.environment or ("math" if are_mathematical(expected_answers(train.rows, form)) else "")
    return Starter(
        algorithm=algorithm,
        model=_from_folder(model, output) if Path(model).exists() else model,
        form=form,
        train=_source(train, output),
        validation=None if validation is None else _source(validation, output),
        rows=len(train.rows),
        grader=grader if grader in graders else None,
        has_template=False,
        is_small=False,
        longest_row=1,
        positions=None,
        prompts_ask_for_box=prompts_ask_for_box(train.rows, form),
        has_text_prompts=has_text_prompts(train.rows, form),
        has_system_messages=has_system_messages(train.rows, form),
        run_name=train.path.stem if output.resolve() == Path.cwd() else output.resolve().name,
    )


def _files(
    starter: Starter,
    train: DataFile,
    validation: DataFile | None,
    *,
    model: str,
    hardware: Hardware | None,
    registry: Registry,
) -> dict[str, str]:
    """The text of each new file by its name."""
    from rlcore_cli.starter.data_file import expected_answers, json_lines_text
    from rlcore_cli.starter.reward_files import reward_files

    files = {_converted_name(file): json_lines_text(file.rows) for file in (train, validation) if file and file.converted}
    rows = f"{counted(starter.rows, 'row')}, each {starter.form.name}"
    head = f"# Trains on {train.path.name}: {rows}. Written by `rlcore init`.\n"
    files[_CONFIG] = head + _config_text(starter, model, hardware, registry)
    if starter.samples and starter.grader is None:
        answers = expected_answers(train.rows, starter.form)
        files |= reward_files(train.path.name, str(answers[0]) if answers else None)
    return files


def _config_text(starter: Starter, model: str, hardware: Hardware | None, registry: Registry) -> str:
    from rlcore_cli.annotated import annotated_yaml
    from rlcore_cli.starter import config_values

    values, comments, head = config_values.config_values(starter), config_values.comments(starter), ""
    if hardware is not None:
        fitted = config_values.fit(values, hardware, registry, model=_absolute(model))
        values, comments, head = dict(fitted.values), comments | config_values.RECIPE_COMMENTS, fitted.description(hardware)
    return head + "\n" + "\n".join(annotated_yaml(values, lambda key: comments.get(key, ""))) + "\n"


def _measured(starter: Starter, train: DataFile, validation: DataFile | None, *, model: str, registry: Registry) -> Starter:
    """With what the model's files and the tokens of the rows show.

    Raises:
        UserError: The model has no tokenizer, or a row is invalid.
    """
    from rl_core.data.tokenizer import load_tokenizer
    from rl_train.assembly.preparation import Preparation
    from rl_train.config.loader import load_config
    from rl_train.diagnostics.model_files import position_limit, read_model_config
    from rl_train.workbench.dataset_view import view_datasets
    from rlcore_cli.starter.config_values import config_values, has_few_parameters
    from rlcore_cli.starter.data_file import expected_answers

    tokenizer = load_tokenizer(starter.tokenizer or model, model_name=model, chat_template=starter.chat_template)
    starter = replace(
        starter,
        has_template=tokenizer.chat_template is not None,
        longest_answer=_longest_answer(tokenizer, expected_answers(train.rows, starter.form)),
    )
    with _readable(train, validation) as (train_source, validation_source):
        preliminary = replace(starter, model=_absolute(model), train=train_source, validation=validation_source)
        values = {key: section for key, section in config_values(preliminary).items() if key != "env"}
        prepared = Preparation(load_config(values, registry=registry, stages=()).run, registry)
        prepared.tokenizer = tokenizer
        views = view_datasets(prepared, measured=_MEASURED, shown=0)
    if any(view.unknown_in_prompt for view in views):
        return _measured(replace(starter, reads_requests=False), train, validation, model=model, registry=registry)
    limit = position_limit(model)
    longest = max(views, key=lambda view: max(view.lengths))
    lengths = sorted(length for view in views for length in view.lengths)

    def measured(problem: str) -> tuple[int, str]:
        """Number of rows with a problem, and the location of the first."""
        first = next((location for view in views for location in view.locations[problem]), "")
        return sum(getattr(view, problem) for view in views), _in_given_file(first, train, validation)

    return replace(
        starter,
        rows=sum(view.rows for view in views if validation is None or view.name == "train"),
        empty_answers=measured("empty_answers"),
        unwritable_answers=measured("unwritable_answers"),
        is_small=has_few_parameters(read_model_config(model)),
        longest_row=lengths[-1],
        next_longest_row=lengths[-2] if len(lengths) > 1 else lengths[-1],
        longest_location=_in_given_file(longest.longest_row, train, validation),
        positions=None if limit is None else limit.tokens,
    )


def _longest_answer(tokenizer: Any, answers: Sequence[Any]) -> int:
    """The most tokens of one of the first answers, or a worked solution that ends with it; 0 without answers."""
    texts = map(str, answers[:_MEASURED])
    return max((len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts), default=0)


@contextmanager
def _readable(train: DataFile, validation: DataFile | None) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any] | None]]:
    """The sources of both files with absolute paths; converted rows are in a temporary folder."""
    from rlcore_cli.starter.data_file import json_lines_text

    with tempfile.TemporaryDirectory() as folder:

        def source(file: DataFile, name: str) -> Mapping[str, Any]:
            path = file.path.resolve()
            if file.converted:
                path = Path(folder) / f"{name}.jsonl"
                path.write_text(json_lines_text(file.rows), encoding="utf-8")
            return {"dataset_name": file.dataset, "path": str(path)}

        yield source(train, "train"), None if validation is None else source(validation, "validation")


def _in_given_file(location: str, *files: DataFile | None) -> str:
    """The location of a row; of a converted file, which was read from a temporary folder, the location in the given file."""
    path, _, line = location.rpartition(":")
    for name, file in zip(("train", "validation"), files, strict=True):
        if file is not None and file.converted and Path(path).name == f"{name}.jsonl":
            return file.locations[int(line) - 1]
    return location


def _source(file: DataFile, output: Path) -> dict[str, Any]:
    path = _converted_name(file) if file.converted else _from_folder(str(file.path), output)
    return {"dataset_name": file.dataset, "path": path}


def _converted_name(file: DataFile) -> str:
    return f"{file.path.stem}.jsonl"


def _absolute(model: str) -> str:
    return str(Path(model).resolve()) if Path(model).exists() else model


def _from_folder(path: str, folder: Path) -> str:
    """A path as a config in a folder names it; an absolute one stays absolute."""
    return path if Path(path).is_absolute() else os.path.relpath(path, folder)


def _write(files: Mapping[str, str], folder: Path) -> None:
    """Write all files, or none if one of them exists.

    Raises:
        ConfigError: A file exists, or the folder cannot be written to.
    """
    _reject_existing(files, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written to: {error.strerror or error}. Choose another --output.") from error


def _reject_existing(names: Iterable[str], folder: Path) -> None:
    if existing := [str(folder / name) for name in names if (folder / name).exists()]:
        raise ConfigError(f"Existing files are not overwritten: {', '.join(existing)}. Choose another folder with --output.")


def _report(
    starter: Starter, form: RowFormat, train: DataFile, validation: DataFile | None, files: Mapping[str, str], output: Path
) -> None:
    from rl_train.data.records import bad_row_lines
    from rlcore_cli.data import EMPTY
    from rlcore_cli.starter.config_values import FEWEST_ROWS
    from rlcore_cli.starter.data_file import ANSWERS

    config = output / _CONFIG
    print(f"{train.path}: {counted(starter.rows, 'row')}, each {form.name}")
    for line in bad_row_lines([*train.bad, *(validation.bad if validation is not None else ())]):
        print(f"Skipped: {line}")
    print(f"Wrote {', '.join(str(output / name) for name in files)}")
    if starter.samples and form.answer_key is None and starter.grader is None:
        print(f"Answers: none, because no field is named {', '.join(ANSWERS)} (fields: {', '.join(train.rows[0])})")
        if len(train.rows[0]) > 2:
            print("If the rows are preference pairs, name their fields: --question FIELD --chosen FIELD --rejected FIELD")
    empty, first = starter.empty_answers
    if empty:
        kinds = {"sft": "conversations", "kto": "unpaired"}
        what, effect = EMPTY["prompts" if starter.samples else kinds.get(starter.algorithm, "pairs")]
        print(f"{what.capitalize()}: {empty} of the measured rows, the first is {first}; {effect}")
    unwritable, first = starter.unwritable_answers
    if unwritable:
        print(
            "Answers with text that the model's tokenizer cannot represent, so the model cannot write them: "
            f"{unwritable}, the first is {first}"
        )
    if starter.longest_row > _OUTLIER * starter.next_longest_row:
        print(
            f"Longest row: {starter.longest_location} has {starter.longest_row:,} tokens, the next longest "
            f"{starter.next_longest_row:,}. Memory and time of a step grow with policy.max_total_sequence_length: remove this "
            "row, or lower that length and set data.on_long_prompt: drop."
        )
    others = ", ".join(f"--algorithm {name}" for name in form.algorithms if name != starter.algorithm)
    print(f"Algorithm: {starter.algorithm}" + (f" (also possible: {others})" if others else ""))
    if not starter.reads_requests:
        print(
            "Prompt: none, because the model's tokenizer has no tokens for its words; the model reads the questions as they are"
        )
    elif starter.samples and form.answer_key is not None and starter.has_system_messages:
        print("Prompt: as in the rows, because they have system messages; none is added that asks for the answer in a format")
    if not starter.validates:
        print(f"Validation: none, because fewer than {FEWEST_ROWS} rows are not split (--validation FILE names held-out rows)")
    check = f"rlcore check env {starter.task} --config {config}" if starter.samples else f"rlcore validate {config} --deep"
    steps = {
        f"rlcore data show {config}": "the rows as the model reads them",
        f"rlcore plan {config}": "the memory that the run needs",
        check: "try the rewards without a model" if starter.samples else "check the config, the model's files and the data",
        f"rlcore train {config}": "train",
    }
    width = max(map(len, steps))
    print("Next:", *(f"  {command:<{width}}  # {what}" for command, what in steps.items()), sep="\n")
