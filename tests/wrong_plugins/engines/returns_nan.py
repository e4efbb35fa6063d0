"""Returns NaN for the last token of a row."""

from wrong_plugins.engines.base import EngineOf

from rl_backends_hf.sampling.generation_worker import HFGenerationWorker


class Worker(HFGenerationWorker):
    def generate(self, data, *, greedy=False):
        output = super().generate(data, greedy=greedy)
        output["logprobs"][0, int(output["unpadded_sequence_lengths"][0]) - 1] = float("nan")
        return output


class Engine(EngineOf):
    worker = Worker
