"""Draws other tokens for the same seeds."""

import torch
from wrong_plugins.engines.base import EngineOf

from rl_backends_hf.sampling.generation_worker import HFGenerationWorker


class Worker(HFGenerationWorker):
    def generate(self, data, *, greedy=False):
        data["sample_seeds"] = torch.randint(2**62, (data.size,))
        return super().generate(data, greedy=greedy)


class Engine(EngineOf):
    worker = Worker
