"""Which metrics share a chart, in which order, and which way is better; it knows metrics by name and draws nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

Direction = Literal["higher", "lower"]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart.

    Attributes:
        title: What it shows.
        metrics: Names, or patterns such as `reward/*`, in the order of the legend.
        unit: Of the values.
        note: What to look for, one sentence.
    """

    title: str
    metrics: tuple[str, ...]
    unit: str = ""
    note: str = ""


PANELS = (
    Panel(title="Reward", metrics=("reward/mean",), note="Mean over the step's rollouts, before the step trains on them."),
    Panel(title="Validation accuracy", metrics=("validation/accuracy",), unit="fraction", note="On held-out data."),
    Panel(title="Validation reward", metrics=("validation/reward",)),
    Panel(title="Validation loss", metrics=("validation/loss",), unit="nats", note="On held-out data."),
    Panel(title="Loss", metrics=("loss", "loss/*"), note="What is minimised. In policy gradients its height means little."),
    Panel(
        title="KL to the reference",
        metrics=("kl/reference",),
        unit="nats",
        note="How far the policy has moved, where the loss or the reward has the penalty.",
    ),
    Panel(
        title="KL to the teacher",
        metrics=("distillation/kl_*", "validation/kl_*"),
        unit="nats",
        note="On the policy's own answers; what distillation brings down.",
    ),
    Panel(
        title="Agreement with the teacher",
        metrics=("distillation/argmax_agreement", "distillation/topk_mass_*", "validation/argmax_agreement"),
        unit="fraction",
        note="Positions where both find the same token likeliest; what the teacher's top-k hold.",
    ),
    Panel(
        title="Explained variance of the critic",
        metrics=("value/explained_variance",),
        note="1: the values say all about the returns; 0: no more than a constant.",
    ),
    Panel(title="Values and returns", metrics=("value/mean", "value/return_mean"), unit="reward"),
    Panel(title="Entropy", metrics=("entropy/*",), unit="nats", note="Falling to 0: the policy has stopped to explore."),
    Panel(
        title="Lengths",
        metrics=("length/mean", "length/max", "validation/length"),
        unit="tokens",
        note="Sampled tokens of a rollout.",
    ),
    Panel(
        title="Clipped and truncated",
        metrics=(
            "ratio/clipped_frac",
            "value/clipped_frac",
            "mismatch/truncated_frac",
            "mismatch/masked_frac",
            "length/truncated_frac",
            "validation/truncated_frac",
        ),
        unit="fraction",
        note="Tokens whose gradient or weight was held; rollouts that a limit cut off.",
    ),
    Panel(
        title="Mismatch KL",
        metrics=("mismatch/kl",),
        unit="nats",
        note="Sampler against policy on the same tokens and weights: 0 where the two agree.",
    ),
    Panel(title="Importance ratio", metrics=("ratio/mean", "ratio/min", "ratio/max")),
    Panel(
        title="Groups that teach nothing",
        metrics=("advantage/equal_group_frac",),
        unit="fraction",
        note="Groups whose rewards are all equal.",
    ),
    Panel(title="Dynamic sampling", metrics=("dynamic_sampling/*",), unit="count"),
    Panel(title="Preference accuracy", metrics=("preference/accuracy",), unit="fraction"),
    Panel(title="Preference margin", metrics=("preference/margin", "preference/score_*")),
    Panel(title="Staleness", metrics=("staleness/*",), unit="optimizer steps"),
    Panel(title="Gradient norm", metrics=("grad_norm",), note="Before clipping."),
    Panel(title="Learning rate", metrics=("lr",)),
    Panel(title="Tokens per second", metrics=("tokens_per_s",), unit="tokens/s", note="Without validation."),
)
"""The charts that are shown first, where a run has their metrics."""

STEP_TIME = "time/step_s"
VALIDATE_TIME = "time/validate_s"
NOT_IN_A_LINE_CHART = ("time/*_s",)
"""Phases are stacked, in a chart of their own."""

MOST_LINES = 8
MOST_FURTHER = 60
"""Lines of one chart; charts of what no panel names."""

_HIGHER = (
    "reward/mean",
    "validation/reward",
    "*accuracy",
    "*argmax_agreement",
    "value/explained_variance",
    "tokens_per_s",
)
_LOWER = (
    "loss/nll",
    "validation/loss",
    "loss/value",
    "distillation/kl_*",
    "validation/kl_*",
    "mismatch/kl",
    "mismatch/max",
    "mismatch/mult_prob_error",
    "refit/canary_error",
    "*truncated_frac",
    "time/*_s",
    "refit/*_s",
    "advantage/equal_group_frac",
)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A panel with the metrics of one run, or of several."""

    panel: Panel
    names: tuple[str, ...]


def choose_panels(names: Iterable[str]) -> tuple[list[Chosen], list[Chosen], list[str]]:
    """The main charts, the further ones by area, and the metrics for which there is no room.

    Args:
        names: Every metric that was recorded.
    """
    remaining = [name for name in names if not _matches(name, NOT_IN_A_LINE_CHART)]
    main = []
    for panel in PANELS:
        own = [name for pattern in panel.metrics for name in remaining if fnmatchcase(name, pattern)]
        own = list(dict.fromkeys(own))[:MOST_LINES]
        if own:
            main.append(Chosen(panel=panel, names=tuple(own)))
            remaining = [name for name in remaining if name not in own]
    further = [Chosen(panel=Panel(title=name, metrics=(name,)), names=(name,)) for name in sorted(remaining)]
    return main, further[:MOST_FURTHER], [chosen.names[0] for chosen in further[MOST_FURTHER:]]


def phases(names: Sequence[str]) -> list[str]:
    """The names of the phases' times, without that of the whole step."""
    return [name for name in names if _matches(name, NOT_IN_A_LINE_CHART) and name != STEP_TIME]


def phase_label(name: str) -> str:
    """`rollout` of `time/rollout_s`."""
    return name.removeprefix("time/").removesuffix("_s")


def in_order(names: Sequence[str]) -> list[str]:
    """Metrics as the charts have them: those of the panels first, the others by name, the times last."""
    main, further, unseen = choose_panels(names)
    ordered = [name for chosen in (*main, *further) for name in chosen.names] + unseen
    return [*ordered, *(name for name in names if name not in ordered)]


def better(name: str) -> Direction | None:
    """Which way a metric is better; None where neither is: entropies, lengths, and `loss`, which policy gradients have too."""
    if _matches(name, _HIGHER):
        return "higher"
    return "lower" if _matches(name, _LOWER) else None


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
