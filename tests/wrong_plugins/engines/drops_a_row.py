"""Returns one row less than it was given."""

from wrong_plugins.engines.base import EngineOf

from rl_backends_hf.sampling.generation_worker import HFGenerationWorker


class Worker(HFGenerationWorker):
    def generate(self, data, *, greedy=False):
        output = super().generate(data, greedy=greedy)
        return output.slice(0, output.size - 1)


class Engine(EngineOf):
    worker = Worker
