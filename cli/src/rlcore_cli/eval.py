"""`rlcore eval`: asks a config's validation data of its model or of a checkpoint, and shows and keeps what it scored."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcore_cli.arguments import Config, Overrides
from rlcore_cli.check_logprobs import prepare_process

if TYPE_CHECKING:
    from rl_core.assembly.evaluate import Evaluated, EvaluationPlan, Pass, Told
    from rl_core.rollouts.scores import Scores

TABLE_WIDTH = 200
"""The most columns of a table; a narrower terminal folds its lines."""


def evaluate(
    config: Config,
    overrides: Overrides = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="A step folder, a run folder (its newest) or a model's folder, in place of the config's model."),
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Of a run folder, the best checkpoint and not the newest.")] = False,
    samples: Annotated[int | None, typer.Option(min=1, help="Sample each prompt so many times.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Ask each prompt greedily; with --samples, both.")] = False,
    k: Annotated[str | None, typer.Option("--k", help="The k of pass@k and cons@k: 1,4,8. Powers of two by default.")] = None,
    reward_above: Annotated[
        float | None, typer.Option(help="Call right what is paid more, in place of the environment's accuracy.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results there; by default into the checkpoint's run folder.")
    ] = None,
) -> None:
    """Evaluate on data.validation: pass@k, cons@k, rewards and lengths, with standard errors over prompts.

    Policy, engine and environments are started as in a run, the weights brought over once and proven. Without --samples and
    --greedy, prompts are asked as the run validates. docs/evaluation.md says what the numbers mean and what the JSON holds.

    Example:
        rlcore eval config.yaml
        rlcore eval config.yaml --checkpoint runs/config --samples 8 --k 1,4,8 --greedy
        rlcore eval config.yaml grpo.max_val_samples=100 --checkpoint runs/config/checkpoints/step_000010 --json scores.json
    """
    prepare_process()
    ks = _numbers(k)
    if json_file is not None:
        _refuse_unwritable(json_file)
    from rl_core.assembly.evaluate import plan_evaluation
    from rl_core.assembly.evaluation_report import default_path, prompts_path, write_results

    plan = plan_evaluation(
        config,
        overrides or [],
        checkpoint=checkpoint,
        best=best,
        samples=samples,
        greedy=greedy,
        ks=ks,
        reward_above=reward_above,
    )
    with _progress() as told:
        evaluated = plan.evaluate(told)
    _print_head(evaluated, plan)
    _print_scores(evaluated.passes)
    path = json_file if json_file is not None else default_path(plan)
    if path is None:
        print("\nnothing was written: --json FILE keeps the results")
        return
    write_results(path, evaluated, plan)
    print(f"\nresults: {path}\nprompts: {prompts_path(path)}")


def _numbers(text: str | None) -> list[int]:
    from rl_core.errors import UserError

    try:
        return [int(part) for part in text.split(",")] if text is not None else []
    except ValueError:
        raise UserError(f"--k {text} is no list of whole numbers. Write them with commas: --k 1,4,8.") from None


def _refuse_unwritable(path: Path) -> None:
    from rl_core.errors import UserError

    if path.is_dir():
        raise UserError(f"--json {path} is a folder. Name a file in it, such as {path / 'eval.json'}.")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--json {path}: there is no folder {path.absolute().parent}. Make it first.")
    is_new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise UserError(f"--json {path} cannot be written: {error.strerror}. Name another file.") from error
    if is_new:
        path.unlink()


@contextmanager
def _progress() -> Iterator[Told]:
    """A live bar on a terminal, a line each time where standard error is piped."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stderr, highlight=False)
    if not console.is_terminal:
        yield lambda name, done, of: print(f"{name} {done}/{of}", file=sys.stderr, flush=True)
        return
    columns = (TextColumn("{task.description:<8}"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bars = {}

        def told(name: str, done: int, of: int) -> None:
            if name not in bars:
                bars[name] = progress.add_task(name, total=of)
            progress.update(bars[name], completed=done)

        yield told


def _print_head(evaluated: Evaluated, plan: EvaluationPlan) -> None:
    policy, weights = plan.loaded.run.policy, evaluated.weights
    engine = policy.generation
    assert engine is not None
    given = weights.given
    what = policy.model_name if given is None else str(given.path)
    print(f"weights {what}" + (f", {given.step} steps" if given is not None and given.is_checkpoint else ""))
    print(f"policy {policy.backend}, engine {engine.backend}; weights by {weights.transport}, proven: {weights.fingerprint}")
    seconds = ", ".join(f"{_title(found)} in {found.seconds:.1f} s" for found in evaluated.passes)
    print(f"{evaluated.passes[0].scores.num_prompts} prompts of {plan.dataset_name}: {seconds}\n")


def _print_scores(passes: Sequence[Pass]) -> None:
    from rich.console import Console
    from rich.table import Table

    # Of a table that is wider than a terminal, or than the 80 columns that it takes a pipe to have, rich would cut numbers off.
    console = Console(highlight=False, width=TABLE_WIDTH)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("task", "metric", *(_title(found) for found in passes)):
        table.add_column(title, no_wrap=True)
    tasks = list(passes[0].by_task)
    for task in tasks if len(tasks) == 1 else ("all", *tasks):
        scores = [found.by_task.get(task, found.scores) for found in passes]
        names = list(dict.fromkeys(name for one in scores for name in one.metrics))
        for name in sorted(names, key=_place):
            table.add_row(task, name, *(_shown(one, name) for one in scores))
        table.add_row(task, "length, longest", *(str(one.max_length) for one in scores))
        table.add_row(task, "prompts", *(str(one.num_prompts) for one in scores), end_section=True)
    console.print(table)
    _print_what_is_missing(passes)


def _print_what_is_missing(passes: Sequence[Pass]) -> None:
    reasons = dict.fromkeys(
        f"{name} is not reported: {why}" for found in passes for name, why in found.scores.not_reported.items()
    )
    if reasons:
        print()
    for reason in reasons:
        print(reason)
    cut = passes[0].scores.num_cut_prompts
    if cut:
        print(f"\n{cut} prompts are longer than data.max_input_seq_length and were asked without their end")


def _place(name: str) -> tuple[int, str, int]:
    """Shares of right samples first, by kind and k; the rest by name."""
    kind, at, k = name.partition("@")
    kinds = ("mean", "pass", "cons")
    return (kinds.index(kind), "", int(k)) if at else (len(kinds), name, 0)


def _shown(scores: Scores, name: str) -> str:
    found = scores.metrics.get(name)
    if found is None:
        return "-"
    digits = 1 if name == "length" else 4
    error = "" if found.standard_error is None else f" ± {found.standard_error:.{digits}f}"
    return f"{found.value:.{digits}f}{error}"


def _title(found: Pass) -> str:
    count = found.asking.samples_per_prompt
    return found.asking.name if count == 1 else f"{found.asking.name} x {count}"
