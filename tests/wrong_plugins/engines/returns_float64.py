"""Returns log-probabilities in double precision."""

from wrong_plugins.engines.base import EngineOf

from rl_backends_hf.sampling.generation_worker import HFGenerationWorker


class Worker(HFGenerationWorker):
    def generate(self, data, *, greedy=False):
        output = super().generate(data, greedy=greedy)
        output["logprobs"] = output["logprobs"].double()
        return output


class Engine(EngineOf):
    worker = Worker
