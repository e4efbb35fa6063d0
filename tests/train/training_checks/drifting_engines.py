"""Engines whose log-probabilities drift from those of the policy after a refit."""

import torch

from rl_backends_base.distributed_generation import DistributedGeneration
from rl_backends_hf.config import HFGenerationConfig
from rl_backends_hf.generation import HFGenerationWorker

CAPABILITIES = ("in_process", "top_p", "top_k", "async_rows", "shared_memory", "held_weight_digests")


class Worker(HFGenerationWorker):
    """Adds `offset` nats to the log-probabilities that it returns from weight version `since` on."""

    since, offset, in_canary = 2, 0.05, False

    def generate(self, data, *, greedy=False):
        output = super().generate(data, greedy=greedy)
        is_canary = "max_new_tokens" in data
        return self._shift(output) if self.in_canary or not is_canary else output

    def _shift(self, output):
        if self.get_weight_version() >= self.since:
            logprobs = output["logprobs"]
            output["logprobs"] = torch.where(logprobs != 0, logprobs - self.offset, logprobs)
        return output


class EverywhereWorker(Worker):
    """Also in the rows of the canary."""

    in_canary = True


class FarWorker(Worker):
    """By more than any rounding."""

    offset = 2.0


class FirstRowsWorker(Worker):
    """In rollouts, in the first two rows only, by less than is allowed for a row."""

    offset = 0.01

    def _shift(self, output):
        shifted = super()._shift(dict(output))["logprobs"]
        output["logprobs"] = torch.cat([shifted[:2], output["logprobs"][2:]])
        return output


class SlightlyStaleWorker(Worker):
    """In rollouts, by little more than is allowed on average, so that no row is beyond its limit."""

    offset = 0.0011


class EngineOf(DistributedGeneration):
    """A generation backend of `worker`, with the section of the backend `hf`."""

    worker = Worker
    capabilities = CAPABILITIES

    def __init__(self, *, config, **kwargs):
        super().__init__(worker_class=self.worker, config=HFGenerationConfig(**{**dict(config), "backend": "hf"}), **kwargs)

    @property
    def tokenizer_section(self):
        return self.config.tokenizer


class OnlyInRollouts(EngineOf):
    worker = Worker


class Everywhere(EngineOf):
    worker = EverywhereWorker


class Far(EngineOf):
    worker = FarWorker


class FirstRows(EngineOf):
    worker = FirstRowsWorker


class SlightlyStale(EngineOf):
    worker = SlightlyStaleWorker
