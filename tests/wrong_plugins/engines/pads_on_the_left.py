"""Pads its rows on the left."""

from wrong_plugins.engines.base import EngineOf

from rl_backends_hf.sampling.generation_worker import HFGenerationWorker


class Worker(HFGenerationWorker):
    def generate(self, data, *, greedy=False):
        output = super().generate(data, greedy=greedy)
        width = output["output_ids"].shape[1]
        for row, length in enumerate(output["unpadded_sequence_lengths"].tolist()):
            for key in ("output_ids", "logprobs"):
                output[key][row] = output[key][row].roll(width - length)
        return output


class Engine(EngineOf):
    worker = Worker
