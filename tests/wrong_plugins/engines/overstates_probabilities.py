"""Returns log-probabilities that are five percent too high."""

from wrong_plugins.engines.base import EngineOf

from rl_backends_hf.sampling.generation_worker import HFGenerationWorker


class Worker(HFGenerationWorker):
    def generate(self, data, *, greedy=False):
        output = super().generate(data, greedy=greedy)
        output["logprobs"] = output["logprobs"] * 0.95
        return output


class Engine(EngineOf):
    worker = Worker
