"""Starts a config's policy and engine without environments, training loop or run folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import ConfigError, DataError
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.assembly.preparation import Preparation
from rl_train.assembly.workers import Builder
from rl_train.config.loader import load_config
from rl_train.config.rules.rule import Use
from rl_train.config.schema import RunConfig
from rl_train.config.sources import ConfigFiles
from rl_train.data.messages import DatumSpec
from rl_train.rollouts.seeds import sample_seed

Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The first prompts of a config's data."""

    batch: BatchedDataDict[Any]
    """The prompts, a `GenerationDatumSpec` with `sample_seeds`."""
    questions: Sequence[Sequence[Message]]
    """The prompts as messages with role and content."""

    def token_ids(self) -> list[torch.Tensor]:
        """One int64 tensor [T] per prompt, without padding."""
        rows = zip(self.batch["input_ids"], self.batch["input_lengths"].tolist(), strict=True)
        return [row[:length] for row, length in rows]


@dataclass(frozen=True, kw_only=True)
class PolicyAndEngine:
    """A policy, and an engine with the same weights."""

    config: RunConfig
    policy: ColocatablePolicyInterface
    generation: GenerationInterface
    refit: str
    """The weight transport; the engine's weights were verified."""

    def engine_precision(self) -> str:
        """Dtypes of the engine's floating-point weights, such as `bfloat16`, separated by commas."""
        dtypes = {digest.partition("[")[0] for digest in self.generation.weight_digests().values()}
        return ", ".join(sorted(name for name in dtypes if "float" in name))

    @property
    def by_reference(self) -> bool:
        """Whether both run in this process."""
        return self.config.cluster.backend == "in_process"


@dataclass(frozen=True, kw_only=True)
class PolicyAndEnginePlan:
    """The config, its tokenizer and its prompts, before any process is started.

    Attributes:
        config: the run.
        registry: used to look up components.
        tokenizer: the policy's.
        prompts: the prompts to sample from.
    """

    config: RunConfig
    registry: Registry
    tokenizer: Any
    prompts: Prompts

    @contextmanager
    def started(self) -> Iterator[PolicyAndEngine]:
        """Start both backends and sync the weights once. Their processes are stopped at the end of the block.

        Raises:
            WeightSyncError: the engine's weights could not be verified.
        """
        with ExitStack() as exits:
            builder = Builder.without_training(self.config, self.registry, exits)
            policy, generation = builder.policy_and_engine()
            # No tokenizer, so that there is no canary: a disagreement should be measured here, not raised.
            weights = builder.weights(policy, generation)
            weights.sync()
            yield PolicyAndEngine(config=builder.run, policy=policy, generation=generation, refit=weights.transport_name)


def plan_policy_and_engine(config_path: ConfigFiles, overrides: Sequence[str] = (), *, num_prompts: int) -> PolicyAndEnginePlan:
    """Load a config, its tokenizer and the first `num_prompts` prompts of its training data. Does not start processes.

    Raises:
        ConfigError: the config is invalid, or has no engine or no data.
        DataError: there is no prompt.
    """
    registry = Registry(discover())
    config = load_config(config_path, overrides, registry=registry, use=Use.COMPARE).run
    # No row after these prompts is used, so none is checked.
    datasets = config.data.model_copy(update={"validation": None, "validation_sets": {}, "check_rows": 0})
    prepared = Preparation(config.model_copy(update={"data": datasets}), registry, datasets=datasets)
    tokenizer = prepared.tokenizer
    return PolicyAndEnginePlan(
        config=config, registry=registry, tokenizer=tokenizer, prompts=_first_prompts(prepared, num_prompts)
    )


def _first_prompts(prepared: Preparation, count: int) -> Prompts:
    train, seed, padding = prepared.data.train, prepared.config.algorithm.seed, prepared.tokenizer.pad_token_id
    if train is None:
        raise ConfigError("data.train is required. Prompts are taken from it. Add `data: {train: {dataset_name: ...}}`.")
    if count < 1:
        raise ConfigError(f"The number of prompts is {count}: use at least 1.")
    first: list[DatumSpec] = next(iter(prepared.prompts(train, batch_size=count)))
    usable = {row: prompt for row, prompt in enumerate(first) if prompt["loss_multiplier"] > 0}
    if not usable:
        raise DataError(f"All of the first {len(first)} prompts are too long and dropped: raise data.max_input_seq_length.")
    logs = [prompt["message_log"] for prompt in usable.values()]
    rows = [torch.cat([message["token_ids"] for message in log]) for log in logs]
    batch: BatchedDataDict[Any] = BatchedDataDict(
        {
            "input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding),
            "input_lengths": torch.tensor([len(row) for row in rows], dtype=torch.int64),
            "stop_strings": [prompt.get("stop_strings") for prompt in usable.values()],
            "sample_seeds": torch.tensor([sample_seed(seed, row) for row in usable], dtype=torch.int64),
        }
    )
    questions = [[{"role": message["role"], "content": message["content"]} for message in log] for log in logs]
    return Prompts(batch=batch, questions=questions)
