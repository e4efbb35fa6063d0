"""Returns 0.0 for the end-of-sequence token."""

import torch
from wrong_plugins.engines.base import EngineOf

from rl_backends_hf.sampling.generation_worker import HFGenerationWorker


class Worker(HFGenerationWorker):
    def generate(self, data, *, greedy=False):
        output = super().generate(data, greedy=greedy)
        ends = output["unpadded_sequence_lengths"] - 1
        output["logprobs"][torch.arange(output.size), ends] = 0.0
        return output


class Engine(EngineOf):
    worker = Worker
