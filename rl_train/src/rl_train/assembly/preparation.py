"""Prepares a run before any of its processes starts: tokenizer, tools, data, and the settings that follow from the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rl_core.errors import ConfigError
from rl_core.plugins.registry import Registry
from rl_train.assembly.data import Source, prompt_loader, read_data, read_validation_sets
from rl_train.assembly.data_loaders import DataLoaders
from rl_train.assembly.late_errors import with_key
from rl_train.assembly.model_checks import tokenizer_key
from rl_train.assembly.reward_checks import resolve_completion_formats
from rl_train.config.data_checks import validates
from rl_train.config.schema import DataConfig, RunConfig
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.data.policy_tokenizer import load_policy_tokenizer
from rl_train.tools.task_tools import TaskTools, tools_of_run


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The datasets of a run.

    Attributes:
        train: the training data; None if there is none.
        validation: the validation data by the name of its set, '' for `data.validation`.
    """

    train: Source | None
    validation: Mapping[str, Source]


class Preparation:
    """What a config needs before processes start. Each part is loaded once, when it is first used.

    Args:
        config: the run, as it was loaded.
        registry: used to look up components.
        datasets: the datasets to read; by default those of a training run: the training data if the algorithm needs it, and
            the validation data if validation is enabled.
    """

    def __init__(self, config: RunConfig, registry: Registry, *, datasets: DataConfig | None = None) -> None:
        self.config = config
        self.registry = registry
        self._datasets = datasets

    @classmethod
    def of_objects(
        cls, config: RunConfig, registry: Registry, *, tokenizer: Any, tools: TaskTools, data: RunData
    ) -> Preparation:
        """A preparation with existing objects instead of those that the config names."""
        prepared = cls(config, registry)
        prepared.tokenizer, prepared.tools, prepared.data = tokenizer, tools, data
        return prepared

    @cached_property
    def tokenizer(self) -> Any:
        """The policy's tokenizer."""
        policy = self.config.policy
        with with_key(f"policy.{tokenizer_key(policy)}"):
            return load_policy_tokenizer(policy)

    @cached_property
    def tools(self) -> TaskTools:
        """The tools that the environments offer to the model."""
        return tools_of_run(self.config, self.registry, self.tokenizer)

    @cached_property
    def data(self) -> RunData:
        """The datasets."""
        if self._datasets is not None:
            return _read(self._datasets, self.registry)
        with with_key("data"):
            _check_presence(self.config)
        if validates(self.config):
            return _read(self.config.data, self.registry)
        training = self.config.data.model_copy(update={"validation": None, "validation_sets": {}})
        return replace(_read(training, self.registry), validation={})

    @cached_property
    def loaders(self) -> DataLoaders:
        """The data as batches of token ids, for a training run."""
        tokenizer, tools, data = self.tokenizer, self.tools, self.data
        with with_key("data"):
            return DataLoaders(self.config, tokenizer, train=data.train, validation=data.validation, tools=tools)

    def prompts(self, source: Source, *, batch_size: int) -> BatchedDataLoader:
        """The prompts of a dataset in their order, for a command that only samples."""
        return prompt_loader(source, self.config, self.tokenizer, batch_size=batch_size, shuffle=False, tools=self.tools)

    @cached_property
    def scoring_config(self) -> RunConfig:
        """The config with the completion formats that fit the data, for a command that only scores."""
        return self._with_completion_formats(self.config)

    @cached_property
    def training_config(self) -> RunConfig:
        """The config with epochs converted to steps, and with the completion formats that fit the data."""
        return self._with_completion_formats(self.loaders.resolve_steps(self.config))

    def _with_completion_formats(self, config: RunConfig) -> RunConfig:
        return resolve_completion_formats(config, self.data.train, *self.data.validation.values())


def _read(datasets: DataConfig, registry: Registry) -> RunData:
    with with_key("data"):
        train, validation = read_data(datasets, registry)
    first = {} if validation is None else {"": validation}
    return RunData(train=train, validation=first | read_validation_sets(datasets, registry))


def _check_presence(config: RunConfig) -> None:
    """Check that the config has the data, the generation backend and the environments that the run needs.

    Raises:
        ConfigError: one of them is missing.
    """
    algorithm, data, needs = config.algorithm, config.data, config.algorithm.runtime_needs
    if needs.training_data and not data.has_training_data:
        raise ConfigError("data.train is required. Add `data: {train: {dataset_name: ...}}`.")
    if validates(config) and not data.has_validation_data:
        raise ConfigError(
            "Validation is enabled (val_period, val_at_start or val_at_end), but there is no validation data. "
            "Add `data: {validation: {dataset_name: ...}}` or `data: {split: {validation: 0.05}}`, or disable validation."
        )
    if needs.samples and (config.policy.generation is None or (algorithm.needs_rewards and not config.env)):
        raise ConfigError(
            f"{config.algorithm_name} samples and scores completions: it needs `policy.generation` and a section in `env`."
        )
