"""Returns log-probabilities with one decimal."""

from wrong_plugins.engines.base import EngineOf

from rl_backends_hf.sampling.generation_worker import HFGenerationWorker


class Worker(HFGenerationWorker):
    def generate(self, data, *, greedy=False):
        output = super().generate(data, greedy=greedy)
        output["logprobs"] = output["logprobs"].round(decimals=1)
        return output


class Engine(EngineOf):
    worker = Worker
