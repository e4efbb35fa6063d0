"""Warnings about a run that will not get better, each once, from the metrics of its steps: likely cause and key to change."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

_log = logging.getLogger("rlcore")

STEPS = 5
"""Number of steps in a row for which a condition must hold, so that one odd step gives no warning."""
_MOSTLY_CUT_OFF = 0.95
"""Fraction of cut-off completions from which hardly any gets to its end; a model that samples ends a few by chance."""
_FEW_DIFFERENCES = 0.95
"""Fraction of groups with equal rewards above which hardly any step has a learning signal."""
_SOLVED = 0.5
"""Accuracy from which equal rewards in some groups mean that their prompts are solved."""
_LONGER = 3.0
_CUT_OFF = 0.3
"""Fraction of cut-off completions that makes growing lengths a problem."""
_FORGOTTEN = 0.1
"""Loss of held-out accuracy, from its best value, while the training reward does not fall."""
_COLLAPSED = 0.02
"""Fraction of the first steps' entropy below which sampling is nearly deterministic."""
_FAR = 1.0
"""KL to the reference policy in nats per token, at which the text has little in common with the reference policy's."""

Step = Mapping[str, float]
"""Metrics of a step, without those that are not finite."""
_READ = frozenset(
    {
        *("length/truncated_frac", "length/mean", "reward/mean", "reward/std", "reward/equal_groups_frac", "rollout/accuracy"),
        *("validation/accuracy", "entropy/sampled", "kl/reference", "lr", "grad_norm"),
    }
)


class RunWarnings:
    """Observes the metrics of each step and logs each warning once per run."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._given: set[str] = set()

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the warnings that the metrics of a step give rise to."""
        for text in self._new(step, metrics):
            _log.warning("%s", text)

    def replay(self, rows: Iterable[Mapping[str, float | None]]) -> None:
        """Continue after the steps of earlier processes, which logged their warnings.

        Args:
            rows: Lines of metrics.jsonl, with `step`.
        """
        for row in rows:
            self._new(int(row["step"] or 0), {name: value for name, value in row.items() if value is not None})

    def finish(self) -> None:
        """At the end of a run, warn if no step had a gradient and no warning has said why, as in trials of a few steps."""
        steps = [row for row in self._steps if "grad_norm" in row]
        if not steps or any(row["grad_norm"] for row in steps) or self._given:
            return
        equal = [row["reward/equal_groups_frac"] == 1.0 for row in steps if "reward/equal_groups_frac" in row]
        cause = "Check that the loss counts some tokens (loss_fn, masks of the data) and that their coefficients are not 0."
        if equal and all(equal):
            cause = (
                "All samples of each prompt had equal rewards: use easier prompts, or a reward that differs between samples."
            )
        elif equal:
            cause = (
                f"The samples of some prompts had different rewards in {equal.count(False)} of them, so their rows were masked "
                "or clipped: check loss_fn and rows without a score or cut off (overlong_filtering)."
            )
        _log.warning("nothing was learned: the gradient was 0 in all %d steps. %s", len(steps), cause)

    def _new(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        self._steps.append({name: value for name, value in metrics.items() if _is_read(name) and math.isfinite(value)})
        new = []
        for name, judge in WARNINGS.items():
            if name not in self._given and (text := judge(self._steps)) is not None:
                self._given.add(name)
                new.append(f"step {step}: {text}")
        return new


def _truncated(steps: Sequence[Step]) -> str | None:
    if not _always(steps, "length/truncated_frac", lambda value: value >= _MOSTLY_CUT_OFF):
        return None
    return (
        f"{_MOSTLY_CUT_OFF:.0%} or more of the completions of the last {STEPS} steps were cut off, so hardly any gets to its "
        "answer and none learns to end. Raise policy.generation.max_new_tokens (and policy.max_total_sequence_length), ask for "
        "shorter answers in the prompt, or check that the model writes its end token (`rlcore check model`)."
    )


def _no_reward(steps: Sequence[Step]) -> str | None:
    if not _always(steps, "reward/mean", lambda value: value == 0.0) or not _always(steps, "reward/std", lambda v: v == 0.0):
        return None
    return (
        f"no completion of the last {STEPS} steps was rewarded, so there is no learning signal. Read rollouts/ in the run "
        "folder: does the environment find an answer where the model writes it (`rlcore data show CONFIG`, `rlcore check "
        "env`)? If it does, use easier prompts, examples in the prompt, or supervised training first."
    )


def _equal_rewards(steps: Sequence[Step]) -> str | None:
    """Rewards that differ in no group, or in hardly any although the task is not solved."""
    everywhere = _always(steps, "reward/equal_groups_frac", lambda value: value == 1.0)
    nearly = _always(steps, "reward/equal_groups_frac", lambda value: value >= _FEW_DIFFERENCES)
    unsolved = _always(steps, "rollout/accuracy", lambda value: value < _SOLVED)
    if _no_reward(steps) is not None or not (everywhere or (nearly and unsolved)):
        return None
    share = "the samples of each prompt all" if everywhere else "in nearly all groups, the samples of a prompt"
    return (
        f"in the last {STEPS} steps, {share} had equal rewards (mean {steps[-1]['reward/mean']:g}), so there is hardly any "
        "learning signal. Check in rollouts/ that the environment extracts answers. Otherwise use easier or harder prompts, "
        "more samples per prompt (num_generations_per_prompt), or a higher policy.generation.temperature."
    )


def _longer_and_longer(steps: Sequence[Step]) -> str | None:
    first, last = _mean(steps[:STEPS], "length/mean"), _mean(steps[-STEPS:], "length/mean")
    rewards = _mean(steps[:STEPS], "reward/mean"), _mean(steps[-STEPS:], "reward/mean")
    cut_off = _mean(steps[-STEPS:], "length/truncated_frac")
    before, now = rewards
    if len(steps) < 2 * STEPS or first is None or last is None or cut_off is None or before is None or now is None:
        return None
    if last < _LONGER * max(first, 1.0) or cut_off < _CUT_OFF or now <= before:
        return None
    return (
        f"the mean length grew from {first:.0f} to {last:.0f} tokens and {cut_off:.0%} of the completions are cut off, while "
        "the reward rises: it may pay for length. Read rollouts/, and limit the length (grpo.reward_shaping, "
        "policy.generation.max_new_tokens) or correct the reward."
    )


def _held_out_falls(steps: Sequence[Step]) -> str | None:
    """Two validations in a row clearly below the best one, while the training reward is as high as then or higher."""
    if not steps or "validation/accuracy" not in steps[-1]:
        return None
    validated = [number for number, row in enumerate(steps) if "validation/accuracy" in row]
    if len(validated) < 3:
        return None
    best = max(validated, key=lambda number: steps[number]["validation/accuracy"])
    top, last = steps[best]["validation/accuracy"], [steps[number]["validation/accuracy"] for number in validated[-2:]]
    # A validation before the first step has no reward: it is compared with those of the first steps.
    then = _mean(steps[max(0, best - STEPS) : (best or STEPS) + 1], "reward/mean")
    now = _mean(steps[-STEPS:], "reward/mean")
    if max(last) > top - _FORGOTTEN or then is None or now is None or now < then:
        return None
    return (
        f"held-out accuracy fell from {top:.3f} to {last[-1]:.3f} while the training reward did not: the policy overfits the "
        "training prompts or exploits the reward. Read rollouts/, use the checkpoint with the best accuracy "
        "(checkpointing.keep_top_k), lower policy.optimizer.kwargs.lr, or add data."
    )


def _entropy(steps: Sequence[Step]) -> str | None:
    first, last = _mean(steps[:STEPS], "entropy/sampled"), _mean(steps[-STEPS:], "entropy/sampled")
    before, now = _mean(steps[:STEPS], "reward/mean"), _mean(steps[-STEPS:], "reward/mean")
    if len(steps) < 2 * STEPS or first is None or last is None or before is None or now is None:
        return None
    if last > _COLLAPSED * first or now > before + 0.05 * max(abs(before), 1.0):
        return None
    return (
        f"the entropy of sampled tokens fell from {first:.3f} to {last:.4f} nats and the reward did not rise: the policy has "
        "stopped exploring. Lower policy.optimizer.kwargs.lr, raise policy.generation.temperature, or add a KL penalty "
        "(loss_fn.reference_policy_kl_penalty)."
    )


def _far_from_reference(steps: Sequence[Step]) -> str | None:
    recent = _recent(steps, "kl/reference")
    if recent is None or min(recent) < _FAR or recent[-1] < recent[0]:
        return None
    return (
        f"the KL to the reference policy has been above {_FAR:g} nat per token for {STEPS} steps and grows ({recent[-1]:.2f}). "
        "Lower policy.optimizer.kwargs.lr, or raise loss_fn.reference_policy_kl_penalty."
    )


def _unparsed(steps: Sequence[Step]) -> str | None:
    names = [name for name in steps[-1] if name.startswith("env/") and name.endswith("/answered_frac")] if steps else []
    for name in names:
        if _always(steps, name, lambda value: value < 0.1):
            task = name.split("/")[1]
            return (
                f"in the last {STEPS} steps, the environment {task!r} found an answer in fewer than 10 % of the completions. "
                f"Tell the model in the prompt where to write its answer (data.prompt), or check env.{task} with rollouts/."
            )
    return None


def _no_learning_rate(steps: Sequence[Step]) -> str | None:
    if not _always(steps, "lr", lambda value: value == 0.0):
        return None
    return (
        f"the learning rate has been 0 for {STEPS} steps, so nothing is learned. Check policy.optimizer.kwargs.lr and the "
        "length of policy.scheduler."
    )


WARNINGS: Mapping[str, Callable[[Sequence[Step]], str | None]] = {
    "truncated": _truncated,
    "no_reward": _no_reward,
    "equal_rewards": _equal_rewards,
    "longer_and_longer": _longer_and_longer,
    "held_out_falls": _held_out_falls,
    "entropy": _entropy,
    "far_from_reference": _far_from_reference,
    "unparsed": _unparsed,
    "no_learning_rate": _no_learning_rate,
}
"""Each returns its warning if the metrics of the steps so far give rise to it, else None."""


def _is_read(name: str) -> bool:
    return name in _READ or (name.startswith("env/") and name.endswith("/answered_frac"))


def _recent(steps: Sequence[Step], name: str) -> list[float] | None:
    """The values of a metric in the last steps; None if one of them lacks it."""
    recent = [row[name] for row in steps[-STEPS:] if name in row]
    return recent if len(recent) == STEPS else None


def _always(steps: Sequence[Step], name: str, holds: Callable[[float], bool]) -> bool:
    recent = _recent(steps, name)
    return recent is not None and all(holds(value) for value in recent)


def _mean(steps: Sequence[Step], name: str) -> float | None:
    values = [row[name] for row in steps if name in row]
    return sum(values) / len(values) if values else None
