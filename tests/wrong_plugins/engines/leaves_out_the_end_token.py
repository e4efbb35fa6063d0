"""Returns rows that have ended without their end-of-sequence token."""

import torch
from wrong_plugins.engines.base import EngineOf

from rl_backends_hf.sampling.generation_worker import HFGenerationWorker


class Worker(HFGenerationWorker):
    def generate(self, data, *, greedy=False):
        output = super().generate(data, greedy=greedy)
        has_end = ~output["truncated"] & (output["generation_lengths"] > 1)
        ends = output["unpadded_sequence_lengths"] - 1
        at_end = torch.arange(output["output_ids"].shape[1]) == ends.unsqueeze(1)
        output["logprobs"] = output["logprobs"].masked_fill(at_end & has_end.unsqueeze(1), 0.0)
        for key in ("generation_lengths", "unpadded_sequence_lengths"):
            output[key] = output[key] - has_end.long()
        return output


class Engine(EngineOf):
    worker = Worker
