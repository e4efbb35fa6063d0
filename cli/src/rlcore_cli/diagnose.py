"""`rlcore check model`: checks the model, tokenizer and backends of a config before a run and suggests fixes."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from rlcore_cli.arguments import AsJson, Bases, Config, Overrides, config_files
from rlcore_cli.check_logprobs import plain

if TYPE_CHECKING:
    from rl_train.diagnostics import Diagnosis

_WIDTH = 120


def diagnose(
    config: Config = None,
    overrides: Overrides = None,
    bases: Bases = None,
    num_prompts: Annotated[int, typer.Option(help="Number of prompts, taken from the start of the training data.", min=1)] = 8,
    as_json: AsJson = False,
) -> None:
    """Check model, tokenizer and backends: chat template, embeddings, longest rows, decoding against prefill.

    Each check is ok, a warning or failed, and shows what was found, why it matters and what to do. Exit code: 1 if a check
    failed, 2 for an error in the config.

    Example:
        rlcore check model config.yaml
        rlcore check model config.yaml policy.generation.max_new_tokens=512 --num-prompts 16
    """
    files, changes = config_files(config, bases, overrides)
    from rl_train.diagnostics import DiagnosisStatus

    diagnoses: list[Diagnosis] = []
    with redirect_stdout(sys.stderr if as_json else sys.stdout):
        from rl_train.assembly.policy_and_engine import plan_policy_and_engine
        from rl_train.evaluation.diagnose import diagnose as all_diagnoses

        for diagnosis in all_diagnoses(plan_policy_and_engine(files, changes, num_prompts=num_prompts)):
            diagnoses.append(diagnosis)
            if not as_json:
                _print(diagnosis)
    if as_json:
        print(json.dumps(plain([asdict(diagnosis) for diagnosis in diagnoses]), indent=2))
    ok, warnings, failed = (
        sum(diagnosis.status is status for diagnosis in diagnoses)
        for status in (DiagnosisStatus.OK, DiagnosisStatus.WARNING, DiagnosisStatus.FAILED)
    )
    if not as_json:
        print(f"\n{ok} ok, {warnings} warnings, {failed} failed")
    if failed:
        raise typer.Exit(1)


def _print(diagnosis: Diagnosis) -> None:
    print(f"{diagnosis.status.value:<8}{diagnosis.name}", flush=True)
    for text in (diagnosis.found, diagnosis.why, diagnosis.remedy):
        if text:
            indent = "        "
            print(fill(text, _WIDTH, initial_indent=indent, subsequent_indent=indent), flush=True)
