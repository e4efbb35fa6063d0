"""Reports the length of the completion as that of the row."""

from wrong_plugins.engines.base import EngineOf

from rl_backends_hf.sampling.generation_worker import HFGenerationWorker


class Worker(HFGenerationWorker):
    def generate(self, data, *, greedy=False):
        output = super().generate(data, greedy=greedy)
        output["unpadded_sequence_lengths"] = output["generation_lengths"].clone()
        return output


class Engine(EngineOf):
    worker = Worker
