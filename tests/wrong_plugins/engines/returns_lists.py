"""Returns lists instead of tensors."""

from wrong_plugins.engines.base import EngineOf

from rl_backends_hf.sampling.generation_worker import HFGenerationWorker
from rl_core.data.batched_data_dict import BatchedDataDict


class Worker(HFGenerationWorker):
    def generate(self, data, *, greedy=False):
        output = super().generate(data, greedy=greedy)
        return BatchedDataDict({key: column.tolist() for key, column in output.items()})


class Engine(EngineOf):
    worker = Worker
