"""Its constructor takes other arguments than a run passes."""

from wrong_plugins.engines.base import EngineOf

from rl_backends_hf.sampling.generation_worker import HFGenerationWorker


class Engine(EngineOf):
    worker = HFGenerationWorker

    def __init__(self, config, model):
        self.model = model
        super().__init__(config=config)
