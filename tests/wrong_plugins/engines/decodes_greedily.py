"""Takes the most likely token where it should sample, with the right log-probabilities."""

from wrong_plugins.engines.base import EngineOf

from rl_backends_hf.sampling.generation_worker import HFGenerationWorker


class Worker(HFGenerationWorker):
    def generate(self, data, *, greedy=False):
        return super().generate(data, greedy=True)


class Engine(EngineOf):
    worker = Worker
