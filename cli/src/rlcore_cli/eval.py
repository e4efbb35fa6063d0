"""`rlcore eval`: evaluates a model or checkpoint on the validation data of a config, prints and saves the scores."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isclose
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rl_core.errors import UserError
from rl_train.run_folders.run_names import completed_runs, existing_run_path, is_run, run_path
from rlcore_cli.arguments import Bases, Overrides, config_files, integers
from rlcore_cli.listing import print_table

if TYPE_CHECKING:
    from rl_train.evaluation.evaluate import EvaluationPlan, EvaluationResult, ModeResult, ProgressCallback
    from rl_train.rollouts.evaluation import Estimate, Scores

ConfigOrRun = Annotated[
    Path | None,
    typer.Argument(
        metavar="CONFIG|RUN",
        help="The config, a YAML file; or a run folder or its name in runs, for its own config and its newest checkpoint.",
        show_default=False,
        autocompletion=completed_runs,
    ),
]


_PROMPTS = ("data.prompt", "policy.tokenizer")
_SAMPLING = ("policy.generation.max_new_tokens", "policy.generation.stop_strings", "policy.max_total_sequence_length")


def evaluate(
    config: ConfigOrRun = None,
    overrides: Overrides = None,
    bases: Bases = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Weights to evaluate instead of the config's model: a step folder; a run folder, or its name in runs, for its "
            "newest checkpoint; or a model folder.",
            autocompletion=completed_runs,
        ),
    ] = None,
    validation_set: Annotated[
        str | None, typer.Option(help="Name in data.validation_sets; data.validation by default.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Use the best checkpoint of a run folder, not the newest.")] = False,
    samples: Annotated[int | None, typer.Option(min=1, help="Number of samples per prompt.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Decode greedily; with --samples, do both.")] = False,
    temperature: Annotated[float | None, typer.Option(hidden=True, help="0, as in `rlcore chat`, is --greedy.")] = None,
    k: Annotated[
        str | None, typer.Option("--k", help="Values of k for pass@k and cons@k, for example 1,4,8. Powers of two by default.")
    ] = None,
    reward_above: Annotated[
        float | None,
        typer.Option(help="Count samples with a reward above this as correct, instead of the environment's accuracy."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Generation backend to use instead of the config's policy.generation.backend.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Results file; by default in the run folder of the checkpoint.")
    ] = None,
) -> None:
    """Evaluate a model or checkpoint on validation data: pass@k, cons@k, rewards, lengths, with standard errors over prompts.

    Starts policy, engine and environments as in a run, and transfers and verifies the weights once. Without --samples
    or --greedy, uses the run's validation sampling. docs/evaluation.md describes the metrics and the JSON file.

    Example:
        rlcore eval config.yaml
        rlcore eval runs/config --samples 8 --k 1,4,8 --greedy
        rlcore eval config.yaml --engine openai ++policy.generation.openai_cfg='{base_url: http://host:8000/v1, model: m}'
        rlcore eval config.yaml grpo.max_val_samples=100 --checkpoint runs/config/checkpoints/step_000010 --json scores.json
    """
    if config is not None and not config.is_file() and is_run(run := run_path(config)):
        config, checkpoint = run / "config.yaml", checkpoint or run
    elif config is not None and not config.suffix and "=" not in str(config):
        existing_run_path(config)  # a config has a suffix: what is missing here was meant as a run
    if temperature:
        raise UserError(f"--temperature must be 0, which is --greedy. To sample: policy.generation.temperature={temperature:g}")
    files, changes = config_files(config, bases, overrides)
    ks = integers(k, "--k", "1,4,8") or []
    if engine is not None:
        changes = [f"policy.generation.backend={engine}", *changes]
    if json_file is not None:
        _reject_unwritable(json_file)
    print(f"evaluating with the config {files[-1]}: loading PyTorch and Ray", file=sys.stderr, flush=True)
    from rl_train.evaluation.evaluate import plan_evaluation
    from rl_train.evaluation.report import default_path, prompts_path, write_results

    plan = plan_evaluation(
        files,
        changes,
        validation_set=validation_set,
        checkpoint=None if checkpoint is None else existing_run_path(checkpoint),
        best=best,
        samples=samples,
        greedy=greedy or temperature == 0,
        ks=ks,
        reward_above=reward_above,
    )
    if warning := _prompts_otherwise(plan):
        print(f"warning: {warning}", file=sys.stderr)
    for key, words in plan.changed_code.items():
        print(f"warning: since the checkpoint was written: {key}: {words}", file=sys.stderr)
    with _progress() as report:
        evaluated = plan.evaluate(report)
    _print_head(evaluated, plan)
    _print_scores(evaluated.passes)
    path = json_file if json_file is not None else default_path(plan)
    if path is None:
        print("\nResults were not saved; use --json FILE to save them")
        return
    write_results(path, evaluated, plan)
    print(f"\nresults: {path}\nprompts: {prompts_path(path)}")


def _prompts_otherwise(plan: EvaluationPlan) -> str | None:
    """A warning if the run of the checkpoint prompted or sampled otherwise than this config does."""
    from yaml import safe_load

    from rl_train.config.values import leaves

    run = None if plan.checkpoint is None else plan.checkpoint.run_folder
    if run is None or not (run / "config.yaml").is_file():
        return None
    then = dict(leaves(safe_load((run / "config.yaml").read_text(encoding="utf-8"))))
    now = dict(leaves(plan.loaded.redacted))
    keys = {key for key in {*then, *now} if key.startswith(_PROMPTS)}
    has_engine, has_environment = (any(key.startswith(section) for key in then) for section in ("policy.generation.", "env."))
    if has_engine:  # without it, the run never sampled
        keys |= {*_SAMPLING}
    if not (changed := sorted(key for key in keys if then.get(key) != now.get(key))):
        return None
    hint = f" `rlcore eval {run}` uses the run's config." if has_engine and has_environment else ""
    return f"the run of the checkpoint had other values of {', '.join(changed)}, so its accuracy may differ.{hint}"


def _reject_unwritable(path: Path) -> None:
    if path.is_dir():
        raise UserError(f"--json {path} is a folder. Give a file, such as {path / 'eval.json'}.")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--json {path}: the folder {path.absolute().parent} does not exist. Create it first.")
    is_new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise UserError(f"--json {path} cannot be written: {error.strerror}. Choose another file.") from error
    if is_new:
        path.unlink()


@contextmanager
def _progress() -> Iterator[ProgressCallback]:
    """Shows a progress bar on a terminal, or prints a line per update if standard error is redirected."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stderr, highlight=False)
    if not console.is_terminal:
        yield lambda name, done, of: print(f"{name} {done}/{of}", file=sys.stderr, flush=True)
        return
    columns = (TextColumn("{task.description:<8}"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bars = {}

        def report(name: str, done: int, of: int) -> None:
            if name not in bars:
                bars[name] = progress.add_task(name, total=of)
            progress.update(bars[name], completed=done)

        yield report


def _print_head(evaluated: EvaluationResult, plan: EvaluationPlan) -> None:
    policy, weights = plan.loaded.run.policy, evaluated.weights
    engine = policy.generation
    assert engine is not None
    checkpoint = weights.checkpoint
    if weights.transport is None:
        print(
            f"engine {engine.backend} with its own weights ({engine.model_name or policy.model_name}), which are not verified"
        )
        _print_duration(evaluated, plan)
        return
    what = policy.model_name if checkpoint is None else str(checkpoint.path)
    print(f"weights {what}" + (f", step {checkpoint.step}" if checkpoint is not None and checkpoint.is_checkpoint else ""))
    print(
        f"policy {policy.backend}, engine {engine.backend}; weights synchronized by {weights.transport}, "
        f"verified: {weights.fingerprint}"
    )
    _print_duration(evaluated, plan)


def _print_duration(evaluated: EvaluationResult, plan: EvaluationPlan) -> None:
    seconds = ", ".join(f"{_title(one)} in {one.seconds:.1f} s" for one in evaluated.passes)
    print(f"{evaluated.passes[0].scores.num_prompts} prompts of {plan.dataset_name}: {seconds}\n")


def _print_scores(passes: Sequence[ModeResult]) -> None:
    table = [["task", "metric", *map(_title, passes)]]
    tasks = list(passes[0].by_task)
    for task in tasks if len(tasks) == 1 else ("all", *tasks):
        scores = [found.by_task.get(task, found.scores) for found in passes]
        metrics = [_without_repetition(one) for one in scores]
        names = list(dict.fromkeys(name for one in metrics for name in one))
        for name in sorted(names, key=_sort_key):
            table.append([task, name, *(_format(one.get(name), name) for one in metrics)])
        table.append([task, "length (max)", *(str(one.max_length) for one in scores)])
        table.append([task, "prompts", *(str(one.num_prompts) for one in scores)])
    print_table(table)
    _print_omissions(passes)


def _print_omissions(passes: Sequence[ModeResult]) -> None:
    reasons = dict.fromkeys(f"{name} is not reported: {why}" for one in passes for name, why in one.scores.not_reported.items())
    if reasons:
        print()
    for reason in reasons:
        print(reason)
    cut = passes[0].scores.num_truncated_prompts
    if cut:
        print(f"\n{cut} prompts exceed data.max_input_seq_length and were truncated")


def _without_repetition(scores: Scores) -> dict[str, Estimate]:
    """The metrics, with `mean@n` as `accuracy`, and without `pass@1` and `cons@1` if they are equal to it."""
    mean = scores.metrics.get(f"mean@{scores.samples_per_prompt}")
    if mean is None:
        return dict(scores.metrics)
    repeated = {name for name in ("pass@1", "cons@1") if isclose(scores.metrics.get(name, mean).value, mean.value)}
    others = {name: value for name, value in scores.metrics.items() if value is not mean and name not in repeated}
    return {"accuracy": mean, **others}


def _sort_key(name: str) -> tuple[int, str, int]:
    """Sort key: shares of correct samples first, by kind and k; then the rest by name."""
    kind, _, k = name.partition("@")
    kinds = ("accuracy", "pass", "cons")
    return (kinds.index(kind), "", int(k or 0)) if kind in kinds else (len(kinds), name, 0)


def _format(estimate: Estimate | None, name: str) -> str:
    if estimate is None:
        return "-"
    digits = 1 if name == "length" else 4
    error = "" if estimate.standard_error is None else f" ± {estimate.standard_error:.{digits}f}"
    return f"{estimate.value:.{digits}f}{error}"


def _title(found: ModeResult) -> str:
    count = found.mode.samples_per_prompt
    return found.mode.name if count == 1 else f"{found.mode.name} x {count}"
