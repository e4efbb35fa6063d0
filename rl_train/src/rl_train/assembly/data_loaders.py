"""The data loaders of a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rl_core.config.source_tree import dotted
from rl_core.errors import ConfigError
from rl_train.assembly.data import BadRows, Source, conversation_loader, preference_loader, prompt_loader
from rl_train.assembly.late_errors import with_key
from rl_train.config.lr_schedule_checks import schedule_conflicts, schedule_warnings
from rl_train.config.schema import RunConfig
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.data.unknown_tokens import WARN_ABOVE, UnknownTokens, count_unknown_tokens
from rl_train.rollouts.batches import PreferenceBatches, TrainingBatches
from rl_train.tools.task_tools import TaskTools

_log = logging.getLogger("rlcore")


class DataLoaders:
    """The data loaders of a run: prompts, preference pairs or conversations, as the algorithm needs.

    Args:
        config: the run.
        tokenizer: the policy's.
        train: the training data; None if the algorithm needs none.
        validation: the validation data by the name of its set, '' for `data.validation`; empty if validation is disabled.
        tools: the tools of the environments; rows without `tools` are shown those of their task.
    """

    def __init__(
        self,
        config: RunConfig,
        tokenizer: Any,
        *,
        train: Source | None,
        validation: Mapping[str, Source],
        tools: TaskTools | None = None,
    ) -> None:
        self.prompts: BatchedDataLoader | None = None
        self.validation_prompts: dict[str, BatchedDataLoader] = {}
        self.batches: TrainingBatches | None = None
        self.answers: TrainingBatches | None = None
        self.validation_batches: dict[str, TrainingBatches] = {}
        needs, shuffle = config.algorithm.runtime_needs, config.data.shuffle
        self.bad_rows = train.bad_rows if train is not None else BadRows()
        val_size = config.algorithm.val_batch_size
        for name, source in validation.items() if needs.samples else ():
            with _at_set(name):
                self.validation_prompts[name] = prompt_loader(
                    source, config, tokenizer, batch_size=val_size, shuffle=False, tools=tools
                )
        if needs.rollouts is not None and train is not None:
            per_draw = needs.rollouts.prompts_per_draw
            self.prompts = prompt_loader(train, config, tokenizer, batch_size=per_draw, shuffle=shuffle, tools=tools)
            if needs.rollouts.sampled_fraction < 1.0:
                rows = needs.rollouts.rows_per_draw
                self.answers = _answer_batches(train, config, tokenizer, batch_size=rows, shuffle=shuffle)
        if needs.records is not None and train is not None:
            rows = needs.records.records_per_step
            self.batches = _answer_batches(train, config, tokenizer, batch_size=rows, shuffle=shuffle)
            for name, source in validation.items():
                with _at_set(name):
                    batches = _answer_batches(source, config, tokenizer, batch_size=val_size, shuffle=False)
                self.validation_batches[name] = batches
        self.unknown_tokens = self._count_unknown_tokens(tokenizer)

    def metrics(self) -> dict[str, float]:
        """Metrics of the training data."""
        metrics: dict[str, float] = {"data/bad_rows": self.bad_rows.count} if self.bad_rows.count else {}
        if self.unknown_tokens is not None:
            metrics["data/unknown_token_frac"] = self.unknown_tokens.fraction
        return metrics

    def _count_unknown_tokens(self, tokenizer: Any) -> UnknownTokens | None:
        """Count unknown tokens in the first training rows, log their fraction, and warn if it is high."""
        rows = self.prompts.dataset if self.prompts is not None else self.batches.rows if self.batches is not None else ()
        counts = count_unknown_tokens(rows, tokenizer)
        if counts is None:
            return None
        _log.info("%.2f %% of the tokens of the first %d training rows are unknown", 100 * counts.fraction, counts.rows)
        if counts.fraction > WARN_ABOVE:
            _log.warning(
                "%.1f %% of the tokens of the first %d training rows are %s, the tokenizer's unknown token; the first such "
                "message is %r. The model cannot learn from this text. Use data that the tokenizer covers, or a model with "
                "another tokenizer.",
                100 * counts.fraction,
                counts.rows,
                tokenizer.unk_token,
                counts.example[:80],
            )
        return counts

    def resolve_steps(self, config: RunConfig) -> RunConfig:
        """The config with epochs converted to steps, after checking that learning-rate schedules fit the run.

        Raises:
            ConfigError: a schedule ends before the run.
        """
        algorithm = config.algorithm
        epochs = algorithm.max_num_epochs
        if epochs is not None and (self.prompts is not None or self.batches is not None):
            num_batches = self.prompts.draws(epochs) if self.prompts is not None else epochs * len(self.batches or ())
            last = min(algorithm.max_num_steps, num_batches)
            counted = algorithm.model_copy(update={"max_num_steps": last, "max_num_epochs": None})
            config = config.model_copy(update={"algorithm": counted})
        if conflicts := [f"{dotted(path)}: {message}" for path, message in schedule_conflicts(config)]:
            raise ConfigError("\n".join(conflicts))
        for path, message in schedule_warnings(config):
            _log.warning("%s: %s", dotted(path), message)
        return config


def _at_set(name: str) -> AbstractContextManager[None]:
    return with_key(f"data.validation_sets.{name}") if name else nullcontext()


def _answer_batches(source: Source, config: RunConfig, tokenizer: Any, *, batch_size: int, shuffle: bool) -> TrainingBatches:
    if config.algorithm.needs_preferences:
        pairs = preference_loader(source, config, tokenizer, batch_size=batch_size, shuffle=shuffle)
        return PreferenceBatches(pairs, pad_token_id=tokenizer.pad_token_id)
    conversations = conversation_loader(source, config, tokenizer, batch_size=batch_size, shuffle=shuffle)
    return TrainingBatches(conversations, pad_token_id=tokenizer.pad_token_id)
