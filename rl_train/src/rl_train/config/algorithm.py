"""The algorithm of a config, found by its section or by the paths in `algorithm`, and what it needs. Does not import torch.

The runtime reads `RuntimeNeeds` and never a field of an algorithm's section by name, so a custom algorithm may choose its own
field names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rl_core.config.diagnostics import KeyPath, Node, Problems, dotted, nearest
from rl_core.config.section import Section
from rl_core.errors import PluginError, UnknownComponentError
from rl_core.plugins.component import Component, Kind, is_path
from rl_core.plugins.registry import Registry
from rl_train.config.foreign_names import INSTEAD, MEANINGS


class AlgorithmPathConfig(Section):
    """An algorithm given by import paths. Its settings are in a separate section with a name of your choice."""

    train: str
    """Dotted path of the training function, `train(config, run)`. Only imported by a run."""
    config: str
    """Dotted path of its settings model, a subclass of `AlgorithmConfig`. Also imported by `rlcore validate`."""


_PATHS = tuple(AlgorithmPathConfig.model_fields)


def choose_algorithm(
    values: Mapping[str, Any],
    *,
    sections: Collection[str],
    written: Node,
    registry: Registry,
    problems: Problems,
    unknown: list[str],
) -> Component | None:
    """The algorithm of the only non-standard section; additional ones are reported.

    Args:
        values: The plain values of the whole config.
        sections: The keys of the sections that every config may have.
        written: The same values with their source locations.
        registry: Used to look up algorithms.
        problems: Receives several algorithms and a missing algorithm.
        unknown: Receives the names of unknown sections, for `report_unknown_section`.
    """
    names = [name for name in values if name not in sections]
    if values.get("algorithm") is not None:
        return _find_by_path(names, values["algorithm"], written=written, registry=registry, problems=problems)
    found = []
    for name in names:
        try:
            component = _find_by_section(name, sections=sections, written=written, registry=registry, problems=problems)
        except UnknownComponentError:
            unknown.append(name)
        else:
            found += [] if component is None else [component]
    if len(found) == 1:
        return found[0]
    if found:
        last = found[-1].name
        problems.add(
            f"A config must have exactly one algorithm section, but this one has {' and '.join(one.name for one in found)}: "
            "remove all but one.",
            location=written.nearest((last,)).key_location,
            path=(last,),
        )
    elif not names:
        known = ", ".join(f"{name}:" for name in registry.names(Kind.ALGORITHM))
        problems.add(
            f"The config has no algorithm section: add one of {known} (it may be empty), or layer it over a packaged config: "
            "`--config grpo.yaml` or `--config sft.yaml`.",
            location=written.location,
        )
    return None


def _find_by_section(
    name: str, *, sections: Collection[str], written: Node, registry: Registry, problems: Problems
) -> Component | None:
    location = written.nearest((name,)).key_location
    if is_path(name):
        first = name.partition(".")[0]
        hint = " Dotted keys only work in overrides: in a file, nest the keys." if first in sections else ""
        hint = hint or " To use an algorithm by its path, set `algorithm: {train: ..., config: ...}`."
        problems.add(f"There is no section {name!r}.{hint}", location=location, path=(name,))
        return None
    try:
        return registry.find(Kind.ALGORITHM, name)
    except UnknownComponentError:
        raise
    except PluginError as error:
        problems.add(str(error), location=location, path=(name,))
    return None


def report_unknown_section(
    name: str, keys: Sequence[KeyPath], *, sections: Collection[str], written: Node, registry: Registry, problems: Problems
) -> None:
    """Reports a section that does not exist, with the keys or the section that its name resembles.

    Args:
        name: The section.
        keys: Keys of other sections with this name or this meaning.
        sections: The keys of the sections that every config may have.
        written: The values with their source locations.
        registry: Has the names of the algorithms.
        problems: Receives the error.
    """
    algorithms = registry.names(Kind.ALGORITHM)
    not_installed = [known.name for known in registry.not_installed() if known.kind is Kind.ALGORITHM]
    meant = None if name in {**MEANINGS, **INSTEAD} else nearest(name, [*sections, *algorithms, *not_installed], cutoff=0.7)
    suggested = [(meant,)] if meant else keys[:2]
    problems.misspelled.update(path for path in suggested if written.at(path) is None)
    if meant:
        hint = f"Did you mean {meant!r}?"
    elif keys:
        hint = f"Did you mean the key {' or '.join(map(dotted, suggested))}?"
    elif name in INSTEAD:
        hint = INSTEAD[name]
    else:
        hint = f"Sections: {', '.join([*algorithms, *sections])}."
    location = written.nearest((name,)).key_location
    problems.add(f"There is no section {name!r}. {hint}", location=location, path=(name,))


def _find_by_path(names: list[str], paths: Any, *, written: Node, registry: Registry, problems: Problems) -> Component | None:
    """A component for the only non-standard section, with the function and the model that `algorithm` names."""
    location = written.nearest(("algorithm",)).key_location
    if len(names) != 1:
        others = f"has {' and '.join(names)}: remove all but one" if names else "has none: add one (it may be empty)"
        problems.add(
            f"requires a section with its settings, under a name of your choice, but this config {others}.",
            location=location,
            path=("algorithm",),
        )
        return None
    [name] = names
    if name in registry.names(Kind.ALGORITHM):
        problems.add(
            f"is the name of an algorithm from a plugin, but {location} sets another algorithm by its path: rename the "
            "section, or remove `algorithm`.",
            location=written.nearest((name,)).key_location,
            path=(name,),
        )
        return None
    if not isinstance(paths, Mapping) or not all(isinstance(paths.get(key), str) for key in _PATHS):
        return None  # reported when the section is validated
    targets = []
    for key in _PATHS:
        try:
            if not is_path(paths[key]):
                raise UnknownComponentError(f"must be a dotted path, package.module.name; found {paths[key]!r}.")
            targets.append(registry.find(Kind.ALGORITHM, paths[key]).target)
        except PluginError as error:
            problems.add(str(error), location=written.nearest(("algorithm", key)).location, path=("algorithm", key))
    if len(targets) < len(_PATHS):
        return None
    try:
        return Component(name, target=targets[0], config=targets[1], summary="given by its path")
    except PluginError as error:
        problems.add(str(error), location=written.nearest((name,)).key_location, path=(name,))
        return None


Companion = Literal["value", "teacher"]
"""A model in addition to the policy, by its section: `value`, a critic that is trained as well, or `teacher`, which is
frozen."""


@dataclass(frozen=True, kw_only=True)
class RolloutNeeds:
    """Rollouts that a step needs."""

    prompts_per_draw: int
    """P, number of prompts that a step takes at once (`RolloutSource.take`); at least 1."""
    samples_per_prompt: int
    """G, number of rollouts per prompt; at least 1."""
    sampled_fraction: float = 1.0
    """Probability that a step samples its rows. In all other steps, the rows are answers from the training data."""
    rewarded: bool = True
    """Whether rollouts must be scored, so that the config must have a section `env`."""
    accepts_segments: bool = False
    """Whether a rollout may have several rows (`rollout_ids`), one for each segment. Otherwise, a config in which rollouts can
    have several segments is refused."""

    accepts_stale: bool = False
    """Whether rows may be sampled with the weights of earlier steps (`rollout.max_staleness` above 0)."""

    selects_groups: bool = False
    """Whether it passes a selection to `RolloutSource.take`, so that the prompts of a step depend on their rewards."""

    def __post_init__(self) -> None:
        _at_least_one(prompts_per_draw=self.prompts_per_draw, samples_per_prompt=self.samples_per_prompt)
        if not 0.0 <= self.sampled_fraction <= 1.0:
            raise ValueError(f"sampled_fraction is {self.sampled_fraction}: it must be a probability from 0 to 1")

    @property
    def rows_per_draw(self) -> int:
        """B = P x G, number of rows of one draw."""
        return self.prompts_per_draw * self.samples_per_prompt


@dataclass(frozen=True, kw_only=True)
class RecordNeeds:
    """Records that a step needs, for an algorithm that trains on the data itself."""

    records_per_step: int
    """Number of conversations, or of pairs of a chosen and a rejected answer, per batch; at least 1."""
    pairs: bool = False
    """Whether a record is a pair of answers."""
    only_final_answer: bool = False
    """Whether to train only on the last assistant message."""

    def __post_init__(self) -> None:
        _at_least_one(records_per_step=self.records_per_step)


@dataclass(frozen=True, kw_only=True)
class RuntimeNeeds:
    """Everything that an algorithm needs from the runtime.

    An algorithm with neither `rollouts` nor `records` needs no training data.
    """

    rollouts: RolloutNeeds | None = None
    """Rollouts of a step (`run.rollouts`); requires `policy.generation`."""
    records: RecordNeeds | None = None
    """Records of a step (`run.batches`)."""
    max_turns: int | None = None
    """Maximum number of turns in a rollout, in training and validation. None means as many as the environment needs."""
    samples_in_validation: bool = False
    """Whether validation samples and scores answers although training does not. Implied by `rollouts`."""
    val_samples_per_prompt: int = 1
    """Number of rollouts per validation prompt; at least 1."""
    companions: tuple[Companion, ...] = ()
    """Models in addition to the policy. The config must have their sections."""

    def __post_init__(self) -> None:
        _at_least_one(max_turns=self.max_turns, val_samples_per_prompt=self.val_samples_per_prompt)
        unknown = set(self.companions) - set(get_args(Companion))
        if unknown:
            raise ValueError(f"companions has {', '.join(sorted(unknown))}: choose from {', '.join(get_args(Companion))}")
        if self.rollouts is not None and self.records is not None:
            raise ValueError("set rollouts or records, not both; to mix data answers into rollouts, use `sampled_fraction`")

    @property
    def samples(self) -> bool:
        """Whether the run needs an engine, environments and, for validation, prompts."""
        return self.rollouts is not None or self.samples_in_validation

    @property
    def training_data(self) -> bool:
        """Whether the run needs training data."""
        return self.rollouts is not None or self.records is not None


def _at_least_one(**counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name} is {count}: it must be at least 1")
