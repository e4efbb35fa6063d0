"""Commands that check the model and backends of a config before a run.

`rlcore check model` looks at model, tokenizer and backends and suggests fixes. `rlcore check logprobs` samples with the engine,
scores the samples with the policy and compares the two.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcore_cli.arguments import AsJson, Bases, Config, Overrides, config_files

if TYPE_CHECKING:
    from rl_train.assembly.run_assembly import PolicyAndEnginePlan
    from rl_train.config.sources import ConfigFiles
    from rl_train.diagnostics import Diagnosis
    from rl_train.evaluation.evaluate import MeasuredAgreement
    from rl_train.logprob_agreement import LogProbabilityAgreement

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
        from rl_train.assembly.run_assembly import plan_policy_and_engine
        from rl_train.evaluation.evaluate import diagnose as all_diagnoses

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


def check_logprobs(
    config: Config = None,
    overrides: Overrides = None,
    bases: Bases = None,
    threshold: Annotated[float, typer.Option(help="Largest exp(mean |d|) that passes the check.")] = 1.05,
    num_prompts: Annotated[int, typer.Option(help="Number of prompts, taken from the start of the training data.", min=1)] = 32,
    as_json: AsJson = False,
) -> None:
    """Check that policy and generation backend agree on log-probabilities.

    Starts both backends of the config, and transfers and verifies the weights once. d is the log-probability under the policy
    minus that under the engine, for every token that the engine samples. See docs/validation.md for the meaning of the numbers
    and typical values. If the policy trains adapters, both values of policy.generation.lora are compared, one after the other.

    Exit code: 0 if they agree, 1 if they do not, 2 for an error in the config.

    Example:
        rlcore check logprobs config.yaml
        rlcore check logprobs config.yaml policy.precision=bfloat16 --num-prompts 128
        rlcore check logprobs config.yaml --threshold 1.001 --json
    """
    files, changes = config_files(config, bases, overrides)
    # Workers print to standard output too; with --json it must contain the JSON only.
    with redirect_stdout(sys.stderr if as_json else sys.stdout):
        from rl_train.assembly.run_assembly import plan_policy_and_engine
        from rl_train.evaluation.evaluate import measure_agreement

        plan = plan_policy_and_engine(files, changes, num_prompts=num_prompts)
        measured = measure_agreement(plan)
        lora = _both_targets(measured, files, changes, num_prompts)
    agreement = measured.agreement
    failures = agreement.failures(threshold)
    if as_json:
        print(json.dumps(_as_json(agreement, _backends(measured), threshold, failures) | plain(lora), indent=2))
    else:
        _print_head(measured)
        _print_numbers(agreement, plan, threshold)
        if lora:
            _print_targets(**lora["lora"])
        _print_status(failures)
    if failures:
        raise typer.Exit(1)


def _both_targets(used: MeasuredAgreement, files: ConfigFiles, changes: Sequence[str], num_prompts: int) -> dict[str, Any]:
    """`lora`: the numbers of both values of `policy.generation.lora`; empty for a policy that trains no adapters."""
    from rl_core.errors import RLCoreError
    from rl_train.assembly.run_assembly import plan_policy_and_engine
    from rl_train.evaluation.evaluate import measure_agreement

    section = used.config.policy.generation
    if section is None or section.lora is None:
        return {}
    other = "merged" if section.lora == "adapter" else "adapter"
    measured, not_compared = {str(section.lora): used}, None
    try:
        plan = plan_policy_and_engine(files, [*changes, f"++policy.generation.lora={other}"], num_prompts=num_prompts)
        measured[other] = measure_agreement(plan)
    except RLCoreError as error:
        not_compared = f"{other} was not compared. {error}"
    numbers = {
        target: {"mean_abs_difference": one.agreement.mean_abs_difference, "kl": one.agreement.kl}
        for target, one in sorted(measured.items())
    }
    zero = any(one.adapters_are_zero for one in measured.values())
    return {"lora": {"used": section.lora, "adapters_are_zero": zero, "not_compared": not_compared, "targets": numbers}}


def _print_targets(used: str, adapters_are_zero: bool, not_compared: str | None, targets: dict[str, dict[str, float]]) -> None:
    from rlcore_cli.listing import print_table

    rows = [["policy.generation.lora", "mean |d|", "KL (k3)", ""]]
    for target, numbers in targets.items():
        values = [f"{numbers[key]:.3e}" for key in ("mean_abs_difference", "kl")]
        rows.append([target, *values, "used by this run" if target == used else ""])
    print()
    print_table(rows)
    if not_compared is not None:
        print(not_compared)
    if adapters_are_zero:
        print("B of all adapters is 0, as before the first step, so both compute the same model.")


def _backends(measured: MeasuredAgreement) -> dict[str, str]:
    policy, engine = measured.config.policy, measured.config.policy.generation
    assert engine is not None
    names = {"policy": f"{policy.backend} {policy.dtype_name}", "engine": f"{engine.backend} {measured.precision}"}
    return {**names, "refit": measured.refit}


def _print_head(measured: MeasuredAgreement) -> None:
    agreement, backends, engine = measured.agreement, _backends(measured), measured.config.policy.generation
    assert engine is not None
    print(f"policy {backends['policy']}, engine {backends['engine']}; weights synchronized by {measured.refit} and verified")
    print(f"{agreement.num_tokens} tokens of {agreement.num_rows} completions at temperature {engine.temperature:g}\n")


def _print_numbers(agreement: LogProbabilityAgreement, plan: PolicyAndEnginePlan, threshold: float) -> None:
    from rlcore_cli.listing import print_table

    worst = agreement.worst
    text = plan.tokenizer.convert_ids_to_tokens(worst.token_id)
    where = f"row {worst.row}, position {worst.position}, token {worst.token_id} {text!r}"
    rows = [
        ["mean |d|", f"{agreement.mean_abs_difference:.3e}", "nats"],
        ["exp(mean |d|)", f"{agreement.multiplicative_error:.6f}", f"limit {threshold:g}"],
        ["mean d", f"{agreement.mean_difference:+.3e}", "nats; a bias appears here"],
        ["max |d|", f"{agreement.max_abs_difference:.3e}", f"nats; {where}"],
        ["KL (k3)", f"{agreement.kl:.3e}", "nats per token"],
    ]
    rows += [[f"|d|, {100 * share:g} %", f"{value:.3e}", "nats; quantile"] for share, value in agreement.quantiles.items()]
    rows += [[f"|d| > {limit:g}", f"{share:.3%}", "of the tokens"] for limit, share in agreement.share_beyond.items()]
    print_table(rows)
    print()
    table = [["position", "tokens", "exp(mean |d|)", "mean d", "max |d|"]]
    for part in agreement.by_position:
        error, bias, largest = part.multiplicative_error, part.mean_difference, part.max_abs_difference
        table.append([part.label, str(part.num_tokens), f"{error:.6f}", f"{bias:+.3e}", f"{largest:.3e}"])
    print_table(table)


def _print_status(failures: list[str]) -> None:
    if not failures:
        print("\nconsistent")
        return
    print("\nnot consistent: " + "; ".join(failures))
    print("See docs/validation.md for typical values and common causes of a difference.")


def _as_json(
    agreement: LogProbabilityAgreement, backends: dict[str, str], threshold: float, failures: list[str]
) -> dict[str, Any]:
    status = {"consistent": not failures, "failures": failures, "threshold": threshold}
    return {**status, **backends, **plain(asdict(agreement))}


def plain(value: Any) -> Any:
    """The value as strict JSON: numbers that are not finite become null, keys become strings."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
