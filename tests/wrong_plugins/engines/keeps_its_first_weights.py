"""Samples from a copy of its first weights, but receives, digests and reports those of the policy."""

import copy

from wrong_plugins.engines.base import EngineOf

from rl_backends_hf.sampling.generation_worker import HFGenerationWorker, RowsInFlight


class Worker(HFGenerationWorker):
    def setup(self):
        facts = super().setup()
        self._sampler.model = copy.deepcopy(self._sampler.model)
        self._rows = RowsInFlight(self._sampler, session_bytes=0)
        return facts


class Engine(EngineOf):
    worker = Worker
