"""Samples one token more than it may, by repeating the last one."""

import torch
from wrong_plugins.engines.base import EngineOf

from rl_backends_hf.sampling.generation_worker import HFGenerationWorker


class Worker(HFGenerationWorker):
    def generate(self, data, *, greedy=False):
        output = super().generate(data, greedy=greedy)
        ends = output["unpadded_sequence_lengths"]
        for key in ("output_ids", "logprobs"):
            column = torch.nn.functional.pad(output[key], (0, 1))
            column[torch.arange(output.size), ends] = column[torch.arange(output.size), ends - 1]
            output[key] = column
        output["generation_lengths"], output["unpadded_sequence_lengths"] = output["generation_lengths"] + 1, ends + 1
        return output


class Engine(EngineOf):
    worker = Worker
