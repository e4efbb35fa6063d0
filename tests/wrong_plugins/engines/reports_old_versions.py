"""Reports that older weights sampled its rows."""

from wrong_plugins.engines.base import EngineOf

from rl_backends_hf.sampling.generation_worker import HFGenerationWorker


class Worker(HFGenerationWorker):
    def generate(self, data, *, greedy=False):
        output = super().generate(data, greedy=greedy)
        output["weight_version"] = output["weight_version"] - 1
        versions = output["token_versions"]
        output["token_versions"] = versions.where(versions < 0, versions - 1)
        return output


class Engine(EngineOf):
    worker = Worker
