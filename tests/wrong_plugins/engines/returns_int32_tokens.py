"""Returns tokens as int32."""

from wrong_plugins.engines.base import EngineOf

from rl_backends_hf.sampling.generation_worker import HFGenerationWorker


class Worker(HFGenerationWorker):
    def generate(self, data, *, greedy=False):
        output = super().generate(data, greedy=greedy)
        output["output_ids"] = output["output_ids"].int()
        return output


class Engine(EngineOf):
    worker = Worker
