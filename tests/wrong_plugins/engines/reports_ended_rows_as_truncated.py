"""Reports every row as cut off at a limit, also those that ended by themselves."""

import torch
from wrong_plugins.engines.base import EngineOf

from rl_backends_hf.sampling.generation_worker import HFGenerationWorker


class Worker(HFGenerationWorker):
    def generate(self, data, *, greedy=False):
        output = super().generate(data, greedy=greedy)
        output["truncated"] = torch.ones_like(output["truncated"])
        return output


class Engine(EngineOf):
    worker = Worker
