"""What all policies here have in common: the Transformers policy with another worker."""

from rl_backends_hf.config import HFPolicyConfig
from rl_core.dispatch.policy import DistributedPolicy


class PolicyOf(DistributedPolicy):
    """A policy of `worker`, which a subclass sets; its section is that of the backend `hf`."""

    worker = None
    capabilities = ("in_process", "ray", "shared_memory", "topk_logprobs")

    def __init__(self, *, config, **kwargs):
        section = HFPolicyConfig(**{**dict(config), "backend": "hf"})
        super().__init__(worker_class=self.worker, config=section, **kwargs)
