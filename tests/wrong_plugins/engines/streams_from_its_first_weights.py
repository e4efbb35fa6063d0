"""Samples complete batches with the policy's weights, but single rows from a copy of its first weights."""

import copy

from wrong_plugins.engines.base import EngineOf

from rl_backends_hf.sampling.generation_worker import HFGenerationWorker, RowsInFlight


class Worker(HFGenerationWorker):
    def setup(self):
        facts = super().setup()
        sampler = copy.copy(self._sampler)
        sampler.model = copy.deepcopy(sampler.model)
        self._rows = RowsInFlight(sampler, session_bytes=0)
        return facts


class Engine(EngineOf):
    worker = Worker
