"""Rules about the metrics that rank checkpoints and stop a run: the run writes them, and when it does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import chain
from typing import Final

from rl_core.config.diagnostics import KeyPath, Problem
from rl_core.plugins.component import Kind, did_you_mean, is_path
from rl_train.config.rules.components import validates
from rl_train.config.rules.rule import TRAINING, CheckedConfig, Stage, Use, rule
from rl_train.config.schema import RunConfig

_READS: Final = ("checkpointing", "algorithm", "loss_fn", "policy", "data", "env")
_KEY: Final[KeyPath] = ("checkpointing", "metric_name")
_STOP: Final[KeyPath] = ("stop", "metric_name")

METRICS: Final = {
    "all runs": "loss loss/policy loss/nll loss/preference loss/sft loss/centring grad_norm lr lr/* num_optimizer_steps "
    "tokens/trained tokens/all tokens/skipped tokens_per_s tflops_per_s mfu time/*_s memory/*_gib data/bad_rows "
    "data/unknown_token_frac data/dropped_rows control/lr_factor kl/penalty_weight",
    "rollouts": "reward/mean reward/std reward/group_std reward/shaped reward/overlong reward/clipped_frac "
    "reward/equal_groups_frac advantage/equal_group_frac advantage/mean advantage/std advantage/clipped_frac "
    "dynamic_sampling/dropped_groups dynamic_sampling/surplus_groups dynamic_sampling/missing_groups rollout/unscored_frac "
    "rollout/failed_rows rollout/repeated_steps rollout/restarted rollout/replaced_groups rollout/turns rollout/rows "
    "rollout/in_flight rollout/ready rollout/wait_s rollout/mixed_version_frac rollout/segments rollout/sampled "
    "rollout/ending_s trainer/idle_frac engine/idle_frac length/mean length/max length/truncated_frac ratio/mean ratio/min "
    "ratio/max ratio/clipped_frac entropy/sampled kl/reference kl/answer mismatch/kl "
    "mismatch/mult_prob_error mismatch/max mismatch/weight_mean mismatch/truncated_frac mismatch/masked_frac staleness/kl "
    "staleness/token_frac staleness/mean staleness/max staleness/steps_mean staleness/steps_max agreement/mean "
    "agreement/worst_row agreement/tokens advantage/baseline",
    "rollouts with an accuracy": "rollout/accuracy",
    "an engine": "refit/prepare_s refit/push_s refit/prove_s refit/total_s refit/paused_s refit/canary_s refit/canary_error "
    "refit/bytes refit/weight_version refit/moved generation/restarts",
    "preference pairs": "preference/accuracy preference/margin preference/score_chosen preference/score_rejected "
    "preference/logprob_chosen preference/logprob_rejected",
    "labelled answers": "kto/margin kto/reward_desirable kto/reward_undesirable kto/desirable_frac kto/kl",
    "a teacher": "distillation/kl_forward distillation/kl_reverse distillation/kl_sampled distillation/topk_mass_teacher "
    "distillation/topk_mass_student distillation/argmax_agreement distillation/aligned_frac",
    "teachers of tasks": "distillation/kl_forward/* distillation/kl_reverse/* distillation/kl_sampled/* "
    "distillation/tokens_frac/*",
    "a teacher with its own prompt": "distillation/too_long_rows",
    "a value model": "loss/value value/explained_variance value/mean value/return_mean value/clipped_frac value/grad_norm "
    "value/lr value/lr/* value/num_optimizer_steps",
    "a prompt sampler": "data/sampler/epochs",
    "the sampler pass_rate_band": "data/sampler/tried_frac data/sampler/below_band_frac data/sampler/in_band_frac "
    "data/sampler/above_band_frac data/sampler/explored_frac",
    "the sampler task_mix": "data/sampler/share/* data/sampler/spread/*",
    "the sampler stages": "data/sampler/stage data/sampler/stage_reward",
}
"""Names and patterns of the metrics of training, by what a run needs to write them."""
VALIDATION: Final = {
    "an engine": "reward length truncated_frac rows failed_rows repeated_steps restarted",
    "rollouts with an accuracy": "accuracy",
    "several samples per validation prompt": "pass@* cons@*",
    "records": "loss tokens",
    "preference pairs": "accuracy margin score_chosen score_rejected logprob_chosen logprob_rejected",
    "labelled answers": "accuracy margin reward_desirable reward_undesirable desirable_frac kl",
    "a teacher": "loss tokens kl_forward kl_reverse kl_sampled topk_mass_teacher topk_mass_student argmax_agreement "
    "aligned_frac",
    "teachers of tasks": "kl_forward/* kl_reverse/* kl_sampled/* tokens_frac/*",
}
"""The same for `validation/...`."""


@rule(*_READS, applies_to=TRAINING)
def checkpoints_are_ranked_by_a_metric_of_the_run(config: CheckedConfig) -> Iterator[Problem]:
    """The metric that ranks checkpoints is one that a component of the run can write."""
    yield from _unwritten(config, _metric(config), _KEY)


@rule("stop", *_READS, applies_to=TRAINING)
def runs_stop_by_a_metric_of_the_run(config: CheckedConfig) -> Iterator[Problem]:
    """The metric that stops a run is one that the run can write, and validation runs if it is one of validation."""
    name, run = config.run.stop.metric_name, config.run
    unwritten = list(_unwritten(config, name, _STOP))
    yield from unwritten
    if name is not None and not unwritten and name.startswith("validation/") and _validation_period(run, name) == 0:
        yield Problem(_STOP, f"{name}: validation never runs between steps. Set {run.algorithm_name}.val_period.")


def _unwritten(config: CheckedConfig, name: str | None, key: KeyPath) -> Iterator[Problem]:
    """The problem that no component of the run can write a metric."""
    run = config.run
    if name is None or _is_among(name, [*_names(run), *_open_names(config, name)]):
        return
    if run.env and not _has_accuracy(run) and name.endswith("/accuracy") and name.startswith(("validation/", "rollout/")):
        why = "reward functions report an accuracy only above a threshold: set env.<task>.correct_above, or use the reward."
    else:
        plain = [metric for metric in _names(run) if "*" not in metric]
        why = f"no component of the run writes such a metric.{did_you_mean(name, plain)} docs/metrics.md lists all."
    yield Problem(key, f"{name}: {why}")


@rule(*_READS, stage=Stage.IMPORTED, applies_to=TRAINING, warns=True)
def checkpoints_have_the_metric_that_ranks_them(config: CheckedConfig) -> Iterator[Problem]:
    """The metric that ranks checkpoints is certain to be written, at steps with a checkpoint."""
    name, run = _metric(config), config.run
    if name is None:
        return
    if not may_write(run, name):
        hint = did_you_mean(name, [metric for metric in _names(run) if "*" not in metric])
        yield Problem(
            _KEY,
            f"{name} cannot be checked before the run, because only user code determines it. All checkpoints are kept until "
            f"the metric is written.{hint}",
        )
    elif validates(run) and not can_be_ranked(run):
        yield Problem(
            _KEY,
            f"validation never runs at a step with a checkpoint, so no checkpoint has {name} and none is kept as the best. Set "
            f"{run.algorithm_name}.val_period so that it divides checkpointing.save_period, or set "
            f"{run.algorithm_name}.val_at_end.",
        )


def can_be_ranked(run: RunConfig) -> bool:
    """Whether a step of the run has both a checkpoint and the validation that its ranking needs, if it needs one."""
    algorithm, saved, name = run.algorithm, run.checkpointing.save_period, run.checkpointing.metric_name or ""
    # The last step is not known yet if epochs are counted.
    if not name.startswith("validation/") or algorithm.val_at_end or algorithm.max_num_epochs is not None:
        return True
    period, last = _validation_period(run, name), algorithm.max_num_steps
    return period > 0 and (last % period == 0 or math.lcm(period, saved) <= last)


def _validation_period(run: RunConfig, name: str) -> int:
    """Steps between the validations that write a metric `validation/...`; 0 if there are none."""
    section = run.data.validation_sets.get(name.split("/")[1])
    return run.algorithm.val_period if section is None or section.val_period is None else section.val_period


def _metric(config: CheckedConfig) -> str | None:
    section = config.run.checkpointing
    return section.metric_name if section.enabled else None


def may_write(run: RunConfig, name: str) -> bool:
    """Whether the config alone shows that a run can write a metric, at least in some steps."""
    return _is_among(name, _names(run))


def _is_among(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _names(run: RunConfig) -> list[str]:
    """Names and patterns of the metrics that the run is certain to know."""
    has = _written_with(run)
    areas = [f"validation/{name}/" for name in run.data.validation_sets]
    areas += ["validation/"] if run.data.validation is not None or run.data.split is not None or not areas else []
    validation = [name for need, names in VALIDATION.items() if has[need] for name in names.split()]
    rewards = [f"reward/{name}" for section in run.env.values() for name in section.reward_names] if has["rollouts"] else []
    training = chain.from_iterable(names.split() for need, names in METRICS.items() if has[need])
    return [*training, *rewards, *(area + name for area in areas for name in validation)]


def _written_with(run: RunConfig) -> dict[str, bool]:
    needs = run.algorithm.runtime_needs
    sampler = None if run.data.sampler is None else run.data.sampler.name
    return {
        "all runs": True,
        "rollouts": needs.rollouts is not None,
        "rollouts with an accuracy": needs.samples and _has_accuracy(run),
        "several samples per validation prompt": needs.samples and needs.val_samples_per_prompt > 1 and _has_accuracy(run),
        "an engine": needs.samples,
        "records": needs.records is not None,
        "preference pairs": run.algorithm.record_kind == "pairs",
        "labelled answers": run.algorithm.record_kind == "unpaired",
        "a teacher": needs.has_teacher,
        "teachers of tasks": bool(run.teachers),
        "a teacher with its own prompt": needs.teacher_prompt is not None,
        "a value model": "value" in needs.companions,
        "a prompt sampler": sampler is not None,
        **{f"the sampler {name}": sampler == name for name in ("pass_rate_band", "task_mix", "stages")},
    }


def _has_accuracy(run: RunConfig) -> bool:
    """Whether an environment may report an accuracy: reward functions do so if they have a threshold."""
    return any(getattr(section, "correct_above", 0.0) is not None for section in run.env.values())


def _open_names(config: CheckedConfig, name: str) -> list[str]:
    """Patterns of metrics that user code may name: rewards, environments, samplers, and algorithms and losses of plugins."""
    run, layout = config.run, config.layout
    patterns = ["reward/?*", *(f"env/{task}/?*" for task in run.env)] if run.algorithm.runtime_needs.rollouts else []
    patterns += ["data/sampler/?*"] if run.data.sampler is not None and is_path(run.data.sampler.name) else []
    sections = [] if layout is None else list(layout.sections.values())
    foreign = {one.kind for one in sections if one.component is None or not one.component.target.startswith("rl_")}
    if config.use is Use.PYTHON or foreign & {Kind.ALGORITHM, Kind.LOSS}:
        patterns += ["*"]
    elif Kind.POLICY in foreign:  # its metrics of training, not those of validation
        patterns += ["*"] if not name.startswith("validation/") else []
    return patterns
