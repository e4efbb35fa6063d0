"""Leaves a column out."""

from wrong_plugins.engines.base import EngineOf

from rl_backends_hf.sampling.generation_worker import HFGenerationWorker


class Worker(HFGenerationWorker):
    def generate(self, data, *, greedy=False):
        output = super().generate(data, greedy=greedy)
        del output["truncated"]
        return output


class Engine(EngineOf):
    worker = Worker
