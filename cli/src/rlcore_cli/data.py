"""`rlcore data`: shows what a run would read from its data."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from rlcore_cli.arguments import AsJson, Bases, Config, Overrides, config_files, counted
from rlcore_cli.lazy import lazy_app

if TYPE_CHECKING:
    from rl_train.workbench.check import GradedAnswers
    from rl_train.workbench.dataset_view import DatasetView, RenderedRow

ACTIONS = {"show": ("rlcore_cli.data:show", "Show rendered rows, lengths, duplicates and answers that cannot be graded.")}
"""Action name: import path of its function, and its line in `rlcore data --help`."""
_BINS = 10
_BAR = 40
"""Width of the longest bar of a histogram, in characters."""
_LISTED = 5
EMPTY = {
    "prompts": ("empty expected answers", "remove these rows"),
    "conversations": ("empty responses", "they train the model to end at once"),
    "pairs": ("empty rejected answers", "they train the model not to end at once"),
    "unpaired": ("empty undesirable answers", "they train the model not to end at once"),
}
"""What an empty answer is, and what it does, by the kind of rows."""

app = lazy_app(ACTIONS)


@app.callback()
def data() -> None:
    """Show what a run would read from its data.

    Example:
        rlcore data show config.yaml
    """


def show(
    config: Config = None,
    overrides: Overrides = None,
    bases: Bases = None,
    shown: Annotated[int, typer.Option("--rows", help="Number of rows of each dataset to print.", min=0)] = 2,
    measured: Annotated[
        int, typer.Option(help="Maximum number of rows of each dataset whose length is measured.", min=1)
    ] = 1000,
    graded: Annotated[
        int, typer.Option(help="Maximum number of expected answers of each task that are graded; 0 for none.", min=0)
    ] = 64,
    as_json: AsJson = False,
) -> None:
    """Show what a run would read from its data, without weights.

    Prints rendered rows with their special tokens, a histogram of lengths in tokens, the share of rows that are too long or
    have text that the tokenizer cannot represent, duplicates within and between training and validation data, and the share of
    expected answers that the environment does not reward. An environment that asks a server to grade is called up to six times
    per expected answer.

    Example:
        rlcore data show config.yaml
        rlcore data show config.yaml --rows 5 --graded 0
        rlcore data show config.yaml --json data.prompt.prompt_config=generic/math
    """
    from rl_core.plugins.manager import discover
    from rl_core.plugins.registry import Registry
    from rl_train.config.loader import load_config

    registry = Registry(discover())
    files, changes = config_files(config, bases, overrides)
    loaded = load_config(files, changes, registry=registry)
    print(f"reading the data of {loaded.path}", file=sys.stderr, flush=True)
    from rl_train.assembly.preparation import Preparation
    from rl_train.workbench.check import grade_expected_answers
    from rl_train.workbench.dataset_view import view_datasets

    prepared = Preparation(loaded.run, registry)
    views = view_datasets(prepared, measured=measured, shown=shown)
    answers = list(grade_expected_answers(prepared, limit=graded)) if graded else []
    if as_json:
        datasets = [{**asdict(view), "too_long": view.too_long} for view in views]
        print(json.dumps({"datasets": datasets, "answers": [asdict(it) for it in answers]}))
        return
    for view in views:
        print("\n".join(_described(view)))
    for it in answers:
        print("\n".join(_described_answers(it)))


def _described(view: DatasetView) -> list[str]:
    kind = "labelled answer" if view.kind == "unpaired" else view.kind.removesuffix("s")
    lines = [f"{view.name}: {counted(view.rows, kind)}"]
    for row in view.samples:
        lines += ["", *_described_row(row)]
    measured = len(view.lengths)
    of_all = "" if measured == view.rows else f" of {measured} evenly spaced rows"
    lines += ["", f"  tokens per row{of_all}, limit {view.limit}:", *_histogram(view.lengths)]
    longest = f", the longest is {view.longest_row}" if view.too_long else ""
    lines += [f"  too long: {_share(view.too_long, measured)}{longest}{_at(view, 'too_long')}"]
    if view.empty_answers:
        what, effect = EMPTY[view.kind]
        lines += [f"  {what}: {_share(view.empty_answers, measured)}; {effect}{_at(view, 'empty_answers')}"]
    if view.unwritable_answers:
        unwritable = f"{_share(view.unwritable_answers, measured)}{_at(view, 'unwritable_answers')}"
        lines += [f"  expected answers with {view.unknown_token}, which the model cannot write: {unwritable}"]
    if total := sum(view.unknown):
        lines += [
            f"  rows with {view.unknown_token}: {_share(sum(map(bool, view.unknown)), measured)}, {counted(total, 'token')}.",
            *_origin_of_unknown(view, total),
        ]
    lines += [f"  desirable: {_share(view.desirable, measured)}"] if view.kind == "unpaired" else []
    lines += [f"  same prompt as an earlier row: {_share(view.repeated, view.rows)}{_at(view, 'repeated')}"]
    if view.name != "train":
        shared = _share(view.shared_with_training, view.rows)
        lines += [f"  same prompt as a training row: {shared}{_at(view, 'shared_with_training')}"]
    return [*lines, ""]


def _at(view: DatasetView, problem: str) -> str:
    """The locations of the first rows with a problem, after a colon."""
    located = view.locations[problem]
    return f": {', '.join(located)}" if located else ""


def _origin_of_unknown(view: DatasetView, total: int) -> list[str]:
    lines = ["The tokenizer has no token for this text, so the model cannot read it. Change the text or use another model."]
    if view.unknown_in_prompt:
        lines += [f"{view.unknown_in_prompt} of them in each row come from the prompt that the config adds (`data.prompt`)."]
    if total > view.unknown_in_prompt * len(view.unknown):
        of_rows = "The others come from" if view.unknown_in_prompt else "It comes from"
        lines += [f"{of_rows} the data or the chat template."]
    return [f"    {line}" for line in lines]


def _described_row(row: RenderedRow) -> list[str]:
    lines = [f"  row {row.index}, {counted(row.tokens, 'token')}:", *(f"    | {line}" for line in row.text.split("\n"))]
    lines += [f"    expected: {row.expected!r}"] if row.expected is not None else []
    lines += [f"    label: {'desirable' if row.label else 'undesirable'}"] if row.label is not None else []
    return [*lines, *(f"    trained: {text!r}" for text in row.trained)]


def _histogram(lengths: tuple[int, ...]) -> list[str]:
    shortest, longest = min(lengths), max(lengths)
    width = max(1, -(-(longest - shortest + 1) // _BINS))
    counts = [0] * ((longest - shortest) // width + 1)
    for length in lengths:
        counts[(length - shortest) // width] += 1
    digits = len(str(longest))
    rows = []
    for number, count in enumerate(counts):
        start = shortest + number * width
        bar = "#" * -(-count * _BAR // max(counts))
        end = min(start + width - 1, longest)
        span = f"{start:>{digits}}-{end:<{digits}}" if end > start else f"{start:>{2 * digits + 1}}"
        rows.append(f"    {span}  {count:>6}  {bar}".rstrip())
    return rows


def _described_answers(answers: GradedAnswers) -> list[str]:
    count = len(answers.unrewarded)
    line = f"env.{answers.task}: expected answers that get no more than a wrong one: {_share(count, answers.graded)}"
    line += f", not scored: {answers.unscored}" if answers.unscored else ""
    rows: dict[str, list[str]] = {}
    for answer, location in zip(answers.unrewarded, answers.locations, strict=True):
        rows.setdefault(answer, []).append(location)
    listed = [f"  {answer!r} {counted(len(its), 'row')}, first {its[0]}" for answer, its in [*rows.items()][:_LISTED]]
    more = [f"  and {len(rows) - _LISTED} more"] if len(rows) > _LISTED else []
    few = f"; {answers.rows_read} of {answers.rows} rows, --graded N for more" if answers.rows_read < answers.rows else ""
    return [f"{line} (as {answers.form.format('ANSWER')!r}){few}", *listed, *more]


def _share(count: int, total: int) -> str:
    return f"{count} of {total} ({100 * count / max(total, 1):.1f} %)"
