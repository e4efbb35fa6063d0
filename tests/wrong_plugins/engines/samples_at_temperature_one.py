"""Ignores the configured temperature."""

from wrong_plugins.engines.base import EngineOf

from rl_backends_hf.sampling.generation_worker import HFGenerationWorker


class Worker(HFGenerationWorker):
    def __init__(self, context, config):
        super().__init__(context, config.model_copy(update={"temperature": 1.0}))


class Engine(EngineOf):
    worker = Worker
