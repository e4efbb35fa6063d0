"""How values of NeMo RL's algorithm sections, losses and checkpoints become ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl_core.config.durations import parse_duration
from rl_core.config.importing.nemo_rl.facts import algorithm_of, validates
from rl_core.config.importing.rows import Becomes, Decision, Refused, Theirs, Unneeded

_GROUPS = ("grpo", "gdpo")
_PAIR_LOSSES = {"dpo": "dpo", "ipo": "ipo"}
_STD_OF_ALL = (
    "rewards are divided by the standard deviation of the whole group; NeMo RL leaves the sample itself out of it, so that its "
    "advantages differ"
)
_METRICS = {
    "val:accuracy": "validation/accuracy",
    "val:reward": "validation/reward",
    "val:loss": "validation/loss",
    "val:val_loss": "validation/loss",
    "train:loss": "loss",
    "train:reward": "reward/mean",
    "train:grad_norm": "grad_norm",
}


def needs_validation(key: str) -> Callable[[Any, Theirs], Decision]:
    """A key that asks for validation, which ours does on a section of data alone."""

    def decide(value: Any, theirs: Theirs) -> Decision:
        if isinstance(value, int) and not isinstance(value, bool) and value < 0:
            return Becomes({key: 0}, "off")
        if validates(theirs) or value in (False, 0):
            return Becomes({key: value})
        return Refused("there is no validation data: data.validation, or a share of the training data under data.split")

    return decide


def validation_batches(value: Any, theirs: Theirs) -> Decision:
    """Batches of a validation, as records."""
    algorithm = algorithm_of(theirs)
    size = theirs.number(f"{algorithm}.val_global_batch_size", 0)
    if not validates(theirs):
        return Unneeded("there is no validation")
    if not isinstance(value, int) or not size:
        return Refused("val_global_batch_size is not there to count records with")
    if value <= 0:
        return Unneeded("all held-out records are used by default")
    return Becomes({f"{algorithm}.max_val_samples": value * size}, "records are counted, not batches")


def of_groups(key: str) -> Callable[[Any, Theirs], Decision]:
    """A key of the estimators that compare a group; the older place of it in `grpo` gives way to the newer one."""

    def decide(value: Any, theirs: Theirs) -> Decision:
        if theirs.get("grpo.adv_estimator.name", "grpo") not in _GROUPS:
            return Unneeded("the estimator compares no groups")
        note = _STD_OF_ALL if key == "use_leave_one_out_baseline" and value is True and _normalizes(theirs) else ""
        return Becomes({f"grpo.adv_estimator.{key}": value}, note)

    return decide


def _normalizes(theirs: Theirs) -> bool:
    key = "normalize_rewards"
    return theirs.get(f"grpo.adv_estimator.{key}", theirs.get(f"grpo.{key}", True)) is True


def older_place(key: str) -> Callable[[Any, Theirs], Decision]:
    """A key of `grpo` that `grpo.adv_estimator` has as well."""

    def decide(value: Any, theirs: Theirs) -> Decision:
        if theirs.get(f"grpo.adv_estimator.{key}") is not None:
            return Unneeded(f"adv_estimator.{key} decides")
        return of_groups(key)(value, theirs)

    return decide


def estimator(value: Any, theirs: Theirs) -> Decision:
    """The advantage estimator."""
    if value in (*_GROUPS, "reinforce_plus_plus"):
        return Becomes({"grpo.adv_estimator.name": value})
    return Refused("grpo has grpo, rloo, reinforce_plus_plus and gdpo here, or an AdvantageEstimator by its dotted path")


def group_baseline(value: Any, theirs: Theirs) -> Decision:
    """The baseline of Reinforce++."""
    if theirs.get("grpo.adv_estimator.name", "grpo") != "reinforce_plus_plus":
        return Unneeded("only reinforce_plus_plus has it")
    return Becomes({"grpo.adv_estimator.minus_baseline": value})


def batch_multiplier(value: Any, theirs: Theirs) -> Decision:
    """How many prompts dynamic sampling draws at once."""
    if theirs.get("grpo.use_dynamic_sampling") is not True:
        return Unneeded("dynamic sampling is off")
    return Becomes({"grpo.batch_multiplier": value})


def steps(value: Any, theirs: Theirs) -> Decision:
    """Steps of the run; a negative number leaves its end to the epochs."""
    key = f"{algorithm_of(theirs)}.max_num_steps"
    if isinstance(value, int) and value < 0:
        return Becomes({key: 1_000_000}, "so many that max_num_epochs ends the run")
    return Becomes({key: value})


def epochs(value: Any, theirs: Theirs) -> Decision:
    """Passes over the data."""
    algorithm = algorithm_of(theirs)
    if algorithm == "grpo" and theirs.get("grpo.use_dynamic_sampling") is True:
        return Refused("dynamic sampling draws as many prompts as it needs, so an epoch is no number of steps: max_num_steps")
    if isinstance(value, int) and value < 0:
        return Unneeded("no limit by default")
    return Becomes({f"{algorithm}.max_num_epochs": value})


def dynamic_sampling(value: Any, theirs: Theirs) -> Decision:
    """Whether groups of equal rewards are replaced."""
    if value is not True:
        return Becomes({"grpo.use_dynamic_sampling": value})
    return Becomes(
        {"grpo.use_dynamic_sampling": True},
        "whole groups are filtered, by the environment's rewards before scaling and shaping; NeMo RL 0.6 filters by shaped "
        "rewards, and single rows under leave-one-out",
    )


def overlong_penalty(algorithm: str) -> Callable[[Any, Theirs], Decision]:
    """The penalty of answers close to the length limit."""

    def decide(value: Any, theirs: Theirs) -> Decision:
        note = "the penalty is bounded by this value; NeMo RL's keeps growing beyond the limit, and counts the first turn only"
        is_on = theirs.get(f"{algorithm}.reward_shaping.enabled") is True
        if value is None:
            return Unneeded("the default is used")
        return Becomes({f"{algorithm}.reward_shaping.overlong_buffer_penalty": value}, note if is_on else "")

    return decide


def kl_penalty(value: Any, theirs: Theirs) -> Decision:
    """The weight of the KL to the reference policy."""
    in_loss = bool(value) and theirs.get("loss_fn.use_kl_in_reward") is not True
    note = (
        "the gradient is that of the estimator alone; NeMo RL adds a score-function term to it, so the same weight pulls "
        "differently"
    )
    return Becomes({"loss_fn.reference_policy_kl_penalty": value}, note if in_loss else "")


def importance_correction(value: Any, theirs: Theirs) -> Decision:
    """Weights that correct for the sampler's log-probabilities."""
    notes = []
    if value is True and theirs.get("loss_fn.sequence_level_importance_ratios") is True:
        notes.append("each token has its own correction weight; NeMo RL has one per sequence with sequence-level ratios")
    if value is True and theirs.get("loss_fn.truncated_importance_sampling_ratio") is None:
        notes.append("weights are truncated at 2.0 by default; NeMo RL leaves them unbounded unless a bound is set")
    return Becomes({"loss_fn.use_importance_sampling_correction": value}, "; ".join(notes))


def kl_type(value: Any, theirs: Theirs) -> Decision:
    """The estimator of the KL penalty."""
    is_penalized = theirs.get("loss_fn.reference_policy_kl_penalty", 0.01) != 0
    in_reward = theirs.get("loss_fn.use_kl_in_reward") is True
    if value == "k1" and is_penalized and not in_reward:
        return Refused("k1 as a part of the loss has an expected gradient of zero: k3 is taken, or set use_kl_in_reward")
    if value in ("k2", "k3") and is_penalized and in_reward:
        return Refused(f"{value} in the reward has a wrong gradient, which raises the KL: k1 is taken")
    return Becomes({"loss_fn.reference_policy_kl_type": value})


def kl_in_reward(value: Any, theirs: Theirs) -> Decision:
    """The penalty as a part of the reward."""
    if value is True and not theirs.get("loss_fn.reference_policy_kl_penalty", 0.01):
        return Unneeded("reference_policy_kl_penalty is 0, so nothing is taken from a reward")
    note = "the estimator in the reward is k1: k2 and k3 have a wrong gradient there"
    says_nothing = value is True and theirs.get("loss_fn.reference_policy_kl_type") is None
    return Becomes({"loss_fn.use_kl_in_reward": value}, note if says_nothing else "")


def truncation(key: str) -> Callable[[Any, Theirs], Decision]:
    """A key of truncated importance sampling, which counts where the correction is on."""

    def decide(value: Any, theirs: Theirs) -> Decision:
        if theirs.get("loss_fn.use_importance_sampling_correction") is not True:
            return Unneeded("the importance-sampling correction is off")
        if value is not None:
            return Becomes({f"loss_fn.{key}": value})
        if key == "truncated_importance_sampling_type":
            return Refused("weights are always truncated here: at 2.0 by `tis`, unless the config says otherwise")
        return Unneeded("the default bound is taken")

    return decide


def on_policy(value: Any, theirs: Theirs) -> Decision:
    """A ratio of 1 where a step makes one update."""
    if value is not True:
        return Unneeded("the ratio is 1 here exactly where a step makes one optimizer step")
    return Becomes({f"{algorithm_of(theirs)}.skip_logprobs_when_on_policy": True}, "where a step makes one optimizer step")


def pair_loss(value: Any, theirs: Theirs) -> Decision:
    """The preference loss."""
    if str(value) in _PAIR_LOSSES:
        return Becomes({"loss_fn.name": _PAIR_LOSSES[str(value)]})
    return Refused("losses over pairs here: dpo, ipo, dpo_hinge, simpo, orpo")


def metric(value: Any, theirs: Theirs) -> Decision:
    """The metric that ranks checkpoints."""
    if value is None:
        return Unneeded("no ranking")
    found = str(value)
    if found.startswith("val:validation") and found.endswith("_loss"):
        found = "val:loss"
    if found not in _METRICS:
        return Refused("no metric here is known to be the same: docs/metrics.md")
    if found.startswith("val:") and not validates(theirs):
        return Refused("there is no validation data to rank checkpoints by")
    return Becomes({"checkpointing.metric_name": _METRICS[found]})


def best_checkpoints(value: Any, theirs: Theirs) -> Decision:
    """How many of the best checkpoints are kept."""
    if value is None or not isinstance(metric(theirs.get("checkpointing.metric_name"), theirs), Becomes):
        return Refused("checkpoints cannot be ranked because metric_name was not imported; the newest keep_latest_k are kept")
    return Becomes({"checkpointing.keep_top_k": value})


def unless_null(key: str) -> Callable[[Any, Theirs], Decision]:
    """A key that may be null there and not here."""
    return lambda value, theirs: Unneeded("the default is taken") if value is None else Becomes({key: value})


def time_limit(value: Any, theirs: Theirs) -> Decision:
    """When the run must have ended with a checkpoint: seconds, or `DD:HH:MM:SS`, whose days are set off by a dash here."""
    if value is None:
        return Unneeded("disabled")
    days, _, rest = str(value).partition(":")
    limit = f"{int(days)}-{rest}" if rest.count(":") == 2 and days.isdigit() else value
    try:
        parse_duration(limit)
    except (TypeError, ValueError) as error:
        return Refused(str(error))
    return Becomes({"checkpointing.max_time": limit})


def unless_zero(key: str) -> Callable[[Any, Theirs], Decision]:
    """A number that is 0 there where it is off, and null here."""
    return lambda value, theirs: Becomes({key: value}) if value else Unneeded("disabled")
