"""`rlcore validate`: reads a config as `rlcore train` does, and prints its errors or a summary. It starts nothing."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcore_cli.annotated import annotated_yaml
from rlcore_cli.arguments import AsJson, Bases, Config, Overrides, config_files, counted

if TYPE_CHECKING:
    from rl_core.config.diagnostics import InvalidConfigError, Problem
    from rl_train.config.loader import ConfigDraft, LoadedConfig

_REPORT_S = 5.0
"""Seconds after which, and then at which intervals, `--deep` reports how long it has been checking."""


def validate(
    config: Config = None,
    overrides: Overrides = None,
    bases: Bases = None,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Print the full config with defaults and the origin of each value.")
    ] = False,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help="Also import referenced modules, load the tokenizer and read the data, but no weights. Takes seconds.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a config without starting anything.

    Lists all errors at once, each with file and line, and exits with code 2 if there are any.

    Example:
        rlcore validate config.yaml
        rlcore validate config.yaml policy.precision=bfloat16 ++policy.optimizer.kwargs.betas='[0.9, 0.95]'
        rlcore validate config.yaml --resolved
        rlcore validate --config grpo.yaml config.yaml
        rlcore validate config.yaml --deep
    """
    from rl_core.config.diagnostics import InvalidConfigError
    from rl_train.config.loader import draft_config
    from rl_train.config.rules import RULES
    from rl_train.config.rules.rule import Stage

    files, changes = config_files(config, bases, overrides, must_exist=False)
    try:
        draft = draft_config(files, changes)
        warnings = draft.check(RULES, Stage.STATIC, Stage.MACHINE)
        warnings += _check_deep(draft, reports=not as_json) if deep else []
        loaded = draft.complete()
    except InvalidConfigError as error:
        _print_errors(error, " + ".join(str(file) for file in files), as_json=as_json)
        raise typer.Exit(error.exit_code) from None
    texts = list(dict.fromkeys(map(str, warnings)))
    if as_json:
        print(json.dumps({"valid": True, "warnings": texts, "config": loaded.redacted}, indent=2))
    elif resolved:
        print("\n".join(annotated_yaml(loaded.redacted, lambda key: str(loaded.source[key]))))
    else:
        print("\n".join([*_summary(loaded), *(f"warning: {text}" for text in texts)]))


def _check_deep(draft: ConfigDraft, *, reports: bool) -> list[Problem]:
    """Add the problems with classes, models and data to those of the sections, and return the warnings."""
    from rl_train.assembly.rules import RULES
    from rl_train.assembly.rules.run_facts import RunFacts
    from rl_train.config.rules.rule import Stage, run_rules
    from rl_train.metrics.progress import reported_start

    def report(line: str) -> None:
        if reports:
            print(line, file=sys.stderr)

    facts = RunFacts.of(draft.checked, located=draft, reported=[problem.path for problem in draft.problems.found])
    with reported_start("checking classes, model files and data:", report, every_s=_REPORT_S):
        return draft.add(run_rules(RULES, facts, Stage.IMPORTED, Stage.DATA))


def _print_errors(error: InvalidConfigError, config: str, *, as_json: bool) -> None:
    from rl_core.config.diagnostics import dotted

    if as_json:
        rows = [
            {
                "location": None if problem.location is None else str(problem.location),
                "file": None if problem.location is None else problem.location.file,
                "line": None if problem.location is None else problem.location.line,
                "column": None if problem.location is None else problem.location.column,
                "key": dotted(problem.path),
                "message": problem.message,
            }
            for problem in error.problems
        ]
        print(json.dumps({"valid": False, "errors": rows, "not_checked": error.not_checked}, indent=2))
        return
    print(f"{config} has {counted(len(error.problems), 'error')}:\n{error}", file=sys.stderr)
    if skipped := len(error.not_checked):
        print(f"Because of these errors, {counted(skipped, 'check')} could not run; --json lists them.", file=sys.stderr)


def _summary(loaded: LoadedConfig) -> list[str]:
    run = loaded.run
    policy, generation, cluster = run.policy, run.policy.generation, run.cluster
    sampler = "none" if generation is None else f"{generation.backend}, up to {generation.max_new_tokens} new tokens"
    rows = {
        "algorithm": f"{run.algorithm_name}, {run.algorithm.max_num_steps} steps, loss {run.loss_fn.name}",
        "policy": f"{policy.backend}, {policy.model_name}, {policy.precision or 'precision by device'}",
        "generation": sampler,
        "data": ", ".join(
            [
                *(f"{key} {dataset.dataset_name}" for key, dataset in run.data.sections().items()),
                *([] if run.data.split is None else [f"{run.data.split.validation} of it held out for validation"]),
            ]
        ),
        "env": ", ".join(_environment(task, section) for task, section in run.env.items()) or "none",
        "cluster": f"{cluster.backend}, {cluster.num_nodes} x {cluster.workers_per_node} policy ranks",
    }
    return [f"{loaded.path} is valid", *(f"  {name:<12}{value}" for name, value in rows.items())]


def _environment(task: str, section: Any) -> str:
    which = section.env_cls or section.name
    return task if which == task else f"{task} ({which})"
