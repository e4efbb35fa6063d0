"""Returns each log-probability one position too early: that of a token stands at the token before it."""

from wrong_plugins.engines.base import EngineOf

from rl_backends_hf.sampling.generation_worker import HFGenerationWorker


class Worker(HFGenerationWorker):
    def generate(self, data, *, greedy=False):
        output = super().generate(data, greedy=greedy)
        output["logprobs"] = output["logprobs"].roll(-1, dims=1)
        return output


class Engine(EngineOf):
    worker = Worker
