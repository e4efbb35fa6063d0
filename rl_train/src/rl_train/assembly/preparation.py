"""What a run needs before any of its processes starts: tokenizer, tools, data, and the settings that follow from the data.

Also what decides its result in addition to the config, for a comparison when the run is resumed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from os.path import isdir  # False for a text that is too long for the file system; Path would raise
from pathlib import Path
from typing import Any, Final

import xxhash

from rl_core.config.diagnostics import KeyPath, dotted
from rl_core.config.section import PathRule
from rl_core.data.hub import names_code
from rl_core.data.model_digests import path_digests
from rl_core.errors import ConfigError, with_key
from rl_core.plugins.registry import Registry
from rl_train.assembly.checks import (
    check_reward_functions,
    refuse_backends_without_images,
    refuse_other_image_processors,
    tokenizer_key,
    tokens_without_rows,
    with_completion_formats,
)
from rl_train.assembly.data import (
    BadRows,
    Source,
    conversation_loader,
    preference_loader,
    prompt_loader,
    read_data,
    read_validation_sets,
)
from rl_train.checkpoints.inputs import FREE_TO_CHANGE, ROWS, Inputs, source_digests
from rl_train.checkpoints.published_files import tokenizer_code
from rl_train.config.loader import LoadedConfig
from rl_train.config.rules.components import validates
from rl_train.config.schema import DataConfig, RunConfig
from rl_train.config.slots import ConfigLayout
from rl_train.config.values import leaves_by_path
from rl_train.data.curricula import make_sampled_prompts
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.data.images import ImageReader
from rl_train.data.processors import load_policy_tokenizer
from rl_train.data.prompt_sampler import SampledPrompts
from rl_train.data.unknown_tokens import refuse_tokens_without_rows, unknown_fraction
from rl_train.rollouts.batches import PreferenceBatches, TrainingBatches
from rl_train.tools.task_tools import TaskTools, tools_of_run

_log = logging.getLogger("rlcore")
_NOT_COMPARED: Final = ("python", "refit_folder")
"""Names of keys with a path that does not decide the result."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The datasets of a run.

    Attributes:
        train: the training data; None if there is none.
        validation: the validation data by the name of its set, '' for `data.validation`.
    """

    train: Source | None
    validation: Mapping[str, Source]

    @property
    def sources(self) -> list[Source]:
        """All of them."""
        return [*filter(None, [self.train]), *self.validation.values()]


class DataLoaders:
    """The data loaders of a run: prompts, preferences or conversations, as the algorithm needs.

    Args:
        config: the run.
        tokenizer: the policy's.
        train: the training data; None if the algorithm needs none.
        validation: the validation data by the name of its set, '' for `data.validation`; empty if validation is disabled.
        tools: the tools of the environments; rows without `tools` are shown those of their task.
        trains: False if the validation data is only sampled from, whatever the algorithm does with it.
    """

    def __init__(
        self,
        config: RunConfig,
        tokenizer: Any,
        *,
        train: Source | None,
        validation: Mapping[str, Source],
        tools: TaskTools | None = None,
        trains: bool = True,
    ) -> None:
        self.prompts: BatchedDataLoader | None = None
        self.sampled: SampledPrompts | None = None
        self.validation_prompts: dict[str, BatchedDataLoader] = {}
        self.batches: TrainingBatches | None = None
        self.answers: TrainingBatches | None = None
        self.validation_batches: dict[str, TrainingBatches] = {}
        self.bad_rows = train.bad_rows if train is not None else BadRows()
        needs, val_size = config.algorithm.runtime_needs, config.algorithm.val_batch_size
        prompts = partial(prompt_loader, run=config, tokenizer=tokenizer, tools=tools)
        answers = partial(_answer_batches, config=config, tokenizer=tokenizer)
        for name, source in validation.items():
            with with_key(f"data.validation_sets.{name}" if name else "data"):
                if not trains:
                    _refuse_rows_without_prompts(source)
                if needs.samples or not trains:
                    self.validation_prompts[name] = prompts(source, batch_size=val_size, shuffle=False)
                if needs.records is not None and trains:
                    self.validation_batches[name] = answers(source, batch_size=val_size, shuffle=False)
        if needs.rollouts is not None and train is not None:
            self.prompts = prompts(train, batch_size=needs.rollouts.prompts_per_draw, shuffle=config.data.shuffle)
            if config.data.sampler is not None:
                stale = config.rollout.max_staleness
                self.sampled = make_sampled_prompts(config.data.sampler, self.prompts, max_staleness=stale)
            if needs.rollouts.sampled_fraction < 1.0:
                self.answers = answers(train, batch_size=needs.rollouts.rows_per_draw, shuffle=config.data.shuffle)
        if needs.records is not None and train is not None:
            self.batches = answers(train, batch_size=needs.records.records_per_step, shuffle=config.data.shuffle)
        rows = self.prompts.dataset if self.prompts is not None else self.batches.rows if self.batches is not None else ()
        refuse_tokens_without_rows(rows, *tokens_without_rows(config, tokenizer))
        self.unknown_fraction = unknown_fraction(rows, tokenizer)

    def metrics(self) -> dict[str, float]:
        """Metrics of the training data."""
        metrics: dict[str, float] = {"data/bad_rows": self.bad_rows.count} if self.bad_rows.count else {}
        if self.unknown_fraction is not None:
            metrics["data/unknown_token_frac"] = self.unknown_fraction
        return metrics

    def resolve_steps(self, config: RunConfig) -> RunConfig:
        """The config with epochs converted to steps."""
        algorithm = config.algorithm
        epochs = algorithm.max_num_epochs
        if epochs is not None and (self.prompts is not None or self.batches is not None):
            num_batches = self.prompts.draws(epochs) if self.prompts is not None else epochs * len(self.batches or ())
            last = min(algorithm.max_num_steps, num_batches)
            if last < num_batches:
                _log.warning(
                    "the run ends after %d of the %d steps of max_num_epochs: %d, so it leaves out rows (max_num_steps: %d)",
                    last,
                    num_batches,
                    epochs,
                    algorithm.max_num_steps,
                )
            counted = algorithm.model_copy(update={"max_num_steps": last, "max_num_epochs": None})
            config = config.model_copy(update={"algorithm": counted})
        return config


class Preparation:
    """What a config needs before processes start. Each part is loaded once, when it is first used.

    Args:
        config: the run, as it was loaded.
        registry: used to look up components.
        datasets: the datasets to read, for a command that only samples and scores; by default those of a training run: the
            training data if the algorithm needs it, and the validation data if validation is enabled.
    """

    def __init__(self, config: RunConfig, registry: Registry, *, datasets: DataConfig | None = None) -> None:
        self.config = config
        self.registry = registry
        self._datasets = datasets

    @classmethod
    def of_objects(
        cls,
        config: RunConfig,
        registry: Registry,
        *,
        tokenizer: Any,
        tools: TaskTools | None = None,
        data: RunData | None = None,
    ) -> Preparation:
        """A preparation with existing objects instead of those that the config names."""
        prepared = cls(config, registry)
        prepared.tokenizer = prepared._with_image_reader(tokenizer)
        if tools is not None:
            prepared.tools = tools
        if data is not None:
            prepared.data = data
        return prepared

    @cached_property
    def tokenizer(self) -> Any:
        """The policy's tokenizer."""
        policy = self.config.policy
        with with_key(f"policy.{tokenizer_key(policy)}"):
            return self._with_image_reader(load_policy_tokenizer(policy))

    def _with_image_reader(self, tokenizer: Any) -> Any:
        """The tokenizer, which reads the images of rows if the models and the engine of the run can use them."""
        run = self.config

        def check() -> None:
            refuse_backends_without_images(run, self.registry, trains=self._datasets is None)
            refuse_other_image_processors(run, tokenizer)

        if not hasattr(tokenizer, "image_reader"):  # a trainer has several runs with one tokenizer
            tokenizer.image_reader = ImageReader(run.policy.model_name, run.data.images, check)
        return tokenizer

    @cached_property
    def tools(self) -> TaskTools:
        """The tools that the environments offer to the model."""
        return tools_of_run(self.config, self.registry, self.tokenizer)

    @cached_property
    def data(self) -> RunData:
        """The datasets."""
        if self._datasets is not None:
            return _read(self._datasets, self.registry)
        if validates(self.config):
            return _read(self.config.data, self.registry)
        training = self.config.data.model_copy(update={"validation": None, "validation_sets": {}})
        return replace(_read(training, self.registry), validation={})

    @cached_property
    def loaders(self) -> DataLoaders:
        """The data as batches of token ids."""
        tokenizer, tools, data, trains = self.tokenizer, self.tools, self.data, self._datasets is None
        with with_key("data"):
            return DataLoaders(
                self.config,
                tokenizer,
                train=data.train if trains else None,
                validation=data.validation,
                tools=tools,
                trains=trains,
            )

    def prompts(self, source: Source, *, batch_size: int) -> BatchedDataLoader:
        """The prompts of a dataset in their order, for a command that only samples."""
        return prompt_loader(source, self.config, self.tokenizer, batch_size=batch_size, shuffle=False, tools=self.tools)

    @cached_property
    def scoring_config(self) -> RunConfig:
        """The config with the completion formats that fit the data, for a command that only scores and checks no rules."""
        for task in self.config.env:
            check_reward_functions(task, self.config, self.data.sources)
        return self.with_completion_formats(self.config)

    @cached_property
    def config_in_steps(self) -> RunConfig:
        """The config with epochs converted to steps."""
        return self.loaders.resolve_steps(self.config)

    @cached_property
    def training_config(self) -> RunConfig:
        """The config with epochs converted to steps, and with the completion formats that fit the data."""
        return self.with_completion_formats(self.config_in_steps)

    def with_completion_formats(self, config: RunConfig) -> RunConfig:
        """A config with the completion formats that fit the data."""
        return with_completion_formats(config, self.data.sources)


def _read(datasets: DataConfig, registry: Registry) -> RunData:
    with with_key("data"):
        train, validation = read_data(datasets, registry)
    first = {} if validation is None else {"": validation}
    return RunData(train=train, validation=first | read_validation_sets(datasets, registry))


def _refuse_rows_without_prompts(source: Source) -> None:
    if len(source.records) and "messages" not in source.records[0]:
        raise ConfigError(
            f"The validation data ({source.name}) has {', '.join(sorted(source.records[0]))} but no messages; it may have "
            "preferences. An evaluation needs prompts, whose answers an environment scores: use a dataset of prompts."
        )


def _answer_batches(source: Source, config: RunConfig, tokenizer: Any, *, batch_size: int, shuffle: bool) -> TrainingBatches:
    loader, batches = {
        "conversations": (conversation_loader, TrainingBatches),
        "pairs": (preference_loader, PreferenceBatches),
        "unpaired": (preference_loader, TrainingBatches),
    }[config.algorithm.record_kind]
    rows = loader(source, config, tokenizer, batch_size=batch_size, shuffle=shuffle)
    return batches(rows, pad_token_id=tokenizer.pad_token_id)


def inputs_of(loaded: LoadedConfig, prepared: Preparation, *, only: tuple[str, ...] = ("",)) -> Inputs:
    """The user code, models, templates, data and tools of a config, except for keys that a resume may change anyway.

    Args:
        loaded: the config.
        prepared: its data and tools.
        only: prefixes of the keys to include; all by default.
    """
    found = {key: {ROWS: digest} for key, digest in _rows(prepared) if key.startswith(only)}
    for task, tools in prepared.tools.offered.items():
        specs = {f"tool {tool['function']['name']}": json.dumps(tool, sort_keys=True, default=str) for tool in tools}
        found[f"env.{task}"] = {name: xxhash.xxh3_64(spec.encode()).hexdigest() for name, spec in specs.items()}
    for path, value in leaves_by_path(loaded.resolved):
        key = dotted(path)
        if key in found or key.startswith(FREE_TO_CHANGE) or not key.startswith(only):
            continue
        if digests := _digests(loaded.layout, path, value):
            found[key] = digests
    return found


def _digests(layout: ConfigLayout, path: KeyPath, value: Any) -> dict[str, str]:
    """The digests of what the value of a key refers to: a path, or the dotted paths of code in it."""
    field = layout.find(path)
    is_path = field is not None and any(isinstance(item, PathRule) for item in field.info.metadata)
    if not is_path or (isinstance(value, str) and names_code(value)):
        return {name: digest for text in _texts(value) for name, digest in source_digests(text).items()}
    if not isinstance(value, str) or path[-1] in _NOT_COMPARED:
        return {}
    files = tokenizer_code(Path(value))[1] if isdir(value) else []
    return path_digests(value) | {name: digest for name in files for digest in path_digests(str(Path(value, name))).values()}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(item)


def _rows(prepared: Preparation) -> Iterator[tuple[str, str]]:
    """The fingerprints of the training data, by the key of its path."""
    train = prepared.data.train
    if train is not None:
        sources = {"train": train} if train.members is None else {f"mix.{name}": one for name, one in train.members.items()}
        for key, source in sources.items():
            if (fingerprint := getattr(source.records, "fingerprint", None)) is not None:
                yield f"data.{key}.path", fingerprint
