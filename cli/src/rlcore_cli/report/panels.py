"""The charts of a report: which metrics share a chart, their order, and whether higher or lower is better."""

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
        title: The title.
        metrics: Names or patterns such as `reward/*`, in the order of the legend.
        unit: Unit of the values.
        note: One sentence on how to read the chart.
    """

    title: str
    metrics: tuple[str, ...]
    unit: str = ""
    note: str = ""


PANELS = (
    Panel(title="Reward", metrics=("reward/mean",), note="Mean over the rollouts of the step, before training on them."),
    Panel(title="Validation accuracy", metrics=("validation/accuracy",), unit="fraction", note="On held-out data."),
    Panel(title="Validation reward", metrics=("validation/reward",)),
    Panel(title="Validation loss", metrics=("validation/loss",), unit="nats", note="On held-out data."),
    Panel(title="Loss", metrics=("loss", "loss/*"), note="The minimized loss. For policy gradients its value means little."),
    Panel(
        title="KL to the reference policy",
        metrics=("kl/reference", "kto/kl"),
        unit="nats",
        note="Distance of the policy from the reference; recorded if the loss or the reward has a KL penalty.",
    ),
    Panel(
        title="KL to the teacher",
        metrics=("distillation/kl_*", "validation/kl_*"),
        unit="nats",
        note="On answers of the policy; distillation minimizes it.",
    ),
    Panel(
        title="Agreement with the teacher",
        metrics=("distillation/argmax_agreement", "distillation/topk_mass_*", "validation/argmax_agreement"),
        unit="fraction",
        note="Positions with the same most likely token; probability mass of the teacher's top-k tokens.",
    ),
    Panel(
        title="Explained variance of the critic",
        metrics=("value/explained_variance",),
        note="1: values predict returns exactly; 0: no better than a constant.",
    ),
    Panel(title="Values and returns", metrics=("value/mean", "value/return_mean"), unit="reward"),
    Panel(title="Entropy", metrics=("entropy/*",), unit="nats", note="Near 0: the policy has stopped exploring."),
    Panel(
        title="Lengths",
        metrics=("length/mean", "length/max", "validation/length"),
        unit="tokens",
        note="Sampled tokens per rollout.",
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
        note="Tokens with clipped ratio or weight; rollouts that reached the length limit.",
    ),
    Panel(
        title="Mismatch KL",
        metrics=("mismatch/kl",),
        unit="nats",
        note="Between sampler and policy on the same tokens and weights; 0 if they agree.",
    ),
    Panel(title="Importance ratio", metrics=("ratio/mean", "ratio/min", "ratio/max")),
    Panel(
        title="Groups without learning signal",
        metrics=("advantage/equal_group_frac",),
        unit="fraction",
        note="Groups in which all rewards are equal.",
    ),
    Panel(title="Dynamic sampling", metrics=("dynamic_sampling/*",), unit="count"),
    Panel(
        title="Prompt sampler",
        metrics=("data/sampler/*_frac", "data/sampler/share/*"),
        unit="fraction",
        note="Rows by their estimated reward, draws that explore, and shares of tasks.",
    ),
    Panel(title="Preference accuracy", metrics=("preference/accuracy", "kto/accuracy"), unit="fraction"),
    Panel(title="Preference margin", metrics=("preference/margin", "preference/score_*", "kto/margin", "kto/reward_*")),
    Panel(title="Staleness in steps", metrics=("staleness/steps_*",), unit="steps"),
    Panel(title="Staleness", metrics=("staleness/*",), unit="optimizer steps"),
    Panel(
        title="Idle",
        metrics=("trainer/idle_frac", "engine/idle_frac"),
        unit="fraction",
        note="Fraction of a step in which the trainer waits for rollouts; in which no rollout waits for the engine.",
    ),
    Panel(title="Gradient norm", metrics=("grad_norm",), note="Before clipping."),
    Panel(title="Learning rate", metrics=("lr",)),
    Panel(title="Tokens per second", metrics=("tokens_per_s",), unit="tokens/s", note="Excluding validation."),
    Panel(
        title="Model TFLOP/s in training", metrics=("tflops_per_s",), unit="TFLOP/s", note="Per rank, without recomputation."
    ),
    Panel(title="MFU", metrics=("mfu",), unit="fraction", note="Model TFLOP/s in training, relative to the device's peak."),
    Panel(
        title="Peak memory by phase",
        metrics=("memory/*",),
        unit="GiB",
        note="The largest process of models and engine: tensors on its GPU or, without GPUs, its resident memory.",
    ),
    Panel(
        title="Environment time",
        metrics=("env/*/wait_s", "env/*/step_s"),
        unit="s per rollout",
        note="Waiting for a free worker, and in calls of the environment.",
    ),
)
"""The main charts, shown if a run has their metrics."""

STEP_TIME = "time/step_s"
NOT_IN_A_LINE_CHART = ("time/*_s",)
"""Phase times have a separate stacked chart."""

MOST_LINES = 8
MOST_FURTHER = 60
"""Maximum number of lines per chart, and of charts for metrics without a panel."""

_HIGHER = (
    "reward/mean",
    "validation/reward",
    "*accuracy",
    "*argmax_agreement",
    "value/explained_variance",
    "tokens_per_s",
    "tflops_per_s",
    "mfu",
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
    "env/*/wait_s",
    "env/*/step_s",
    "advantage/equal_group_frac",
    "memory/*",
)


@dataclass(frozen=True, kw_only=True)
class SelectedPanel:
    """A panel and the recorded metrics that it shows."""

    panel: Panel
    names: tuple[str, ...]


def choose_panels(names: Iterable[str]) -> tuple[list[SelectedPanel], list[SelectedPanel], list[str]]:
    """The main charts, the additional charts by name, and the metrics that are not shown.

    Args:
        names: All recorded metrics.
    """
    remaining = [name for name in names if not _matches(name, NOT_IN_A_LINE_CHART)]
    main = []
    for panel in PANELS:
        own = [name for pattern in panel.metrics for name in remaining if fnmatchcase(name, pattern)]
        own = list(dict.fromkeys(own))[:MOST_LINES]
        if own:
            main.append(SelectedPanel(panel=panel, names=tuple(own)))
            remaining = [name for name in remaining if name not in own]
    further = [SelectedPanel(panel=Panel(title=name, metrics=(name,)), names=(name,)) for name in sorted(remaining)]
    return main, further[:MOST_FURTHER], [chosen.names[0] for chosen in further[MOST_FURTHER:]]


def phases(names: Sequence[str]) -> list[str]:
    """The metrics with phase times, without the time of the whole step."""
    return [name for name in names if _matches(name, NOT_IN_A_LINE_CHART) and name != STEP_TIME]


def phase_label(name: str) -> str:
    """The phase in the name of a time metric: `rollout` for `time/rollout_s`."""
    return name.removeprefix("time/").removesuffix("_s")


def in_order(names: Sequence[str]) -> list[str]:
    """Metrics in the order of the charts: panels first, then others by name, times last."""
    main, further, unseen = choose_panels(names)
    ordered = [name for chosen in (*main, *further) for name in chosen.names] + unseen
    return [*ordered, *(name for name in names if name not in ordered)]


def better(name: str) -> Direction | None:
    """Whether higher or lower is better; None if neither: entropy, lengths, and `loss`, which policy gradients also record."""
    if _matches(name, _HIGHER):
        return "higher"
    return "lower" if _matches(name, _LOWER) else None


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
