"""Sections that a command needs, and sections that it would ignore."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.config.diagnostics import Problem
from rl_train.config.rules.rule import TRAIN_ONLY, TRAINING, CheckedConfig, Use, rule
from rl_train.config.schema import RolloutConfig, RunConfig
from rl_train.config.slots import COMPANIONS

_WHY_AN_ENGINE = {
    Use.EVAL: "An evaluation samples completions. Choose a generation `backend`, for example ++policy.generation.backend=hf.",
    Use.COMPARE: "Without it there is no engine to compare with the policy. Choose a generation `backend`, for example "
    "++policy.generation.backend=hf.",
    Use.SERVE: "Without it there is no engine. Choose a generation `backend`: ++policy.generation.backend=BACKEND.",
}
_PAIRS_ARE_NOT_SAMPLED = (
    "An evaluation samples answers to prompts, but {algorithm} uses preference pairs. The accuracy on held-out pairs is the "
    "metric `validation/accuracy` of the run."
)
_ROWS_ARE_NOT_SAMPLED = "An evaluation samples answers to prompts, but {algorithm} trains on given answers."
_SAMPLES_ELSEWHERE = (
    " To sample from the trained policy, name a config with prompts and an environment: "
    "`rlcore eval CONFIG_WITH_PROMPTS_AND_ENV --checkpoint RUN`."
)


def validates(run: RunConfig) -> bool:
    """Whether validation is enabled."""
    algorithm = run.algorithm
    has_period = algorithm.val_period > 0 or any(section.val_period for section in run.data.validation_sets.values())
    return has_period or algorithm.val_at_start or algorithm.val_at_end


@rule("algorithm", "policy.generation", applies_to=frozenset({Use.TRAIN, *_WHY_AN_ENGINE}))
def what_samples_has_an_engine(config: CheckedConfig) -> Iterator[Problem]:
    """A run whose algorithm samples, an evaluation and a server have a section `policy.generation`."""
    run = config.run
    if config.samples and run.policy.generation is None:
        trains = f"{run.algorithm_name} samples from the policy. Choose a generation `backend`."
        reason = _WHY_AN_ENGINE.get(config.use, trains)
        if config.use is Use.EVAL and not run.algorithm.runtime_needs.samples:
            why = _PAIRS_ARE_NOT_SAMPLED if run.algorithm.needs_preferences else _ROWS_ARE_NOT_SAMPLED
            reason = why.format(algorithm=run.algorithm_name)
            reason += _SAMPLES_ELSEWHERE if run.algorithm.head == "tokens" else ""
        yield Problem(("policy", "generation"), f"is required. {reason}", is_missing=True)


@rule("algorithm", "env", "policy.generation", applies_to=frozenset({Use.TRAIN, Use.EVAL}))
def samples_are_scored(config: CheckedConfig) -> Iterator[Problem]:
    """A run that trains on rewards and an evaluation have a section `env`."""
    run = config.run
    if config.use is Use.EVAL:
        # Without sampling in training, the missing engine is reported, and another config is the remedy.
        if not run.env and (run.algorithm.runtime_needs.samples or run.policy.generation is not None):
            yield Problem(
                ("env",),
                "is required. An evaluation scores completions with an environment. Add one, such as `math:`, or "
                "++env.math.num_workers=1.",
                is_missing=True,
            )
    elif run.algorithm.runtime_needs.samples and run.algorithm.needs_rewards and not run.env:
        aim = "trains on" if run.algorithm.needs_generation else "validates with"
        yield Problem(
            ("env",),
            f"is required. {run.algorithm_name} {aim} rewards from an environment. Add one, such as `math:`.",
            is_missing=True,
        )


@rule("algorithm", "data", applies_to=TRAIN_ONLY)
def training_has_data(config: CheckedConfig) -> Iterator[Problem]:
    """An algorithm that trains on data has training data."""
    run = config.run
    if run.algorithm.runtime_needs.training_data and not run.data.has_training_data:
        yield Problem(
            ("data", "train"),
            f"is required. {run.algorithm_name} needs training data. Set `dataset_name`, or `data.train_data_path`.",
            is_missing=True,
        )


@rule("algorithm", "data", applies_to=TRAIN_ONLY)
def validation_has_data(config: CheckedConfig) -> Iterator[Problem]:
    """A run that validates has validation data."""
    run = config.run
    if validates(run) and not run.data.has_validation_data:
        setting = next(key for key in ("val_period", "val_at_start", "val_at_end") if getattr(run.algorithm, key))
        yield Problem(
            (run.algorithm_name, setting),
            "enables validation, but there is no validation data: set data.validation or data.split, or disable validation.",
        )


@rule("algorithm", "env", applies_to=TRAIN_ONLY)
def only_what_samples_has_environments(config: CheckedConfig) -> Iterator[Problem]:
    """A run that never samples has no section `env`."""
    if config.run.env:
        yield from _without_effect(config, ("env",), "does not sample or score, so", "env.<task>")


@rule("algorithm", "rollout", applies_to=TRAIN_ONLY)
def only_what_samples_has_rollouts(config: CheckedConfig) -> Iterator[Problem]:
    """A run that never samples has no section `rollout`."""
    if config.run.rollout != RolloutConfig():
        yield from _without_effect(config, ("rollout",), "does not sample, so", "rollout.retries")


@rule("algorithm", "policy.generation", applies_to=TRAIN_ONLY)
def only_what_samples_has_an_engine(config: CheckedConfig) -> Iterator[Problem]:
    """A run that never samples has no section `policy.generation`."""
    if config.run.policy.generation is not None:
        reason = "does not sample, so no engine is started and"
        yield from _without_effect(config, ("policy", "generation"), reason, "policy.generation.backend")


def _without_effect(config: CheckedConfig, path: tuple[str, ...], reason: str, key: str) -> Iterator[Problem]:
    if not config.run.algorithm.runtime_needs.samples:
        yield Problem(
            path,
            f"{config.run.algorithm_name} {reason} the section has no effect. Remove the section, or set it in the command "
            f"that uses it (`rlcore eval config.yaml ++{key}=...`).",
        )


@rule("algorithm", *COMPANIONS, applies_to=TRAINING, each=lambda _: [(name,) for name in COMPANIONS])
def companions_are_those_of_the_algorithm(config: CheckedConfig, companion: str) -> Iterator[Problem]:
    """A value model and a teacher are configured if the algorithm uses them, and only then."""
    run = config.run
    is_used, is_configured = companion in run.algorithm.runtime_needs.companions, getattr(run, companion) is not None
    if is_configured and not is_used:
        yield Problem((companion,), f"{run.algorithm_name} does not use a {companion}: remove the section.")
    elif is_used and not is_configured:
        yield Problem(
            (companion,),
            f"is required. {run.algorithm_name} needs a {companion} model. Set its `backend` and `model_name`.",
            is_missing=True,
        )
