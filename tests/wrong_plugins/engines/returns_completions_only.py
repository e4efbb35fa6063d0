"""Returns the sampled tokens without the prompt."""

from wrong_plugins.engines.base import EngineOf

from rl_backends_hf.sampling.generation_worker import HFGenerationWorker


class Worker(HFGenerationWorker):
    def generate(self, data, *, greedy=False):
        output = super().generate(data, greedy=greedy)
        width = int(data["input_lengths"].max())
        output["output_ids"], output["logprobs"] = output["output_ids"][:, width:], output["logprobs"][:, width:]
        output["unpadded_sequence_lengths"] = output["generation_lengths"].clone()
        return output


class Engine(EngineOf):
    worker = Worker
