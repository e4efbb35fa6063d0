"""What most engines here have in common: the Transformers engine with another worker."""

from rl_backends_hf.config import HFGenerationConfig
from rl_core.dispatch.generation import DistributedGeneration


class EngineOf(DistributedGeneration):
    """An engine of `worker`, which a subclass sets; its section is that of the backend `hf`."""

    worker = None
    capabilities = ("in_process", "async_rows", "refit_in_flight", "shared_memory", "held_weight_digests")

    def __init__(self, *, config, **kwargs):
        super().__init__(worker_class=self.worker, config=HFGenerationConfig(**{**dict(config), "backend": "hf"}), **kwargs)

    @property
    def tokenizer_section(self):
        return self.config.tokenizer
