"""Returns logarithms to the base of 2."""

import math

from wrong_plugins.engines.base import EngineOf

from rl_backends_hf.sampling.generation_worker import HFGenerationWorker


class Worker(HFGenerationWorker):
    def generate(self, data, *, greedy=False):
        output = super().generate(data, greedy=greedy)
        output["logprobs"] = output["logprobs"] / math.log(2)
        return output


class Engine(EngineOf):
    worker = Worker
