"""Returns the right tokens with the log-probabilities of the next row."""

import torch
from wrong_plugins.engines.base import EngineOf

from rl_backends_hf.sampling.generation_worker import HFGenerationWorker


class Worker(HFGenerationWorker):
    def generate(self, data, *, greedy=False):
        output = super().generate(data, greedy=greedy)
        inside = output["logprobs"] != 0
        output["logprobs"] = torch.where(inside, output["logprobs"].roll(1, dims=0), 0.0)
        return output


class Engine(EngineOf):
    worker = Worker
