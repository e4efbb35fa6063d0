"""Returns the last two rows in each other's place."""

from wrong_plugins.engines.base import EngineOf

from rl_backends_hf.sampling.generation_worker import HFGenerationWorker


class Worker(HFGenerationWorker):
    def generate(self, data, *, greedy=False):
        output = super().generate(data, greedy=greedy)
        order = [*range(output.size - 2), output.size - 1, output.size - 2]
        return output.select_indices(order)


class Engine(EngineOf):
    worker = Worker
