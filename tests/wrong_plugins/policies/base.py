"""What all policies here have in common: the Transformers policy with another worker."""

from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.dispatch.policy import DistributedPolicy


class PolicyOf(DistributedPolicy):
    """A policy of `worker`, which a subclass sets; its section is that of the backend `hf`."""

    worker = None
    capabilities = ("in_process", "multiple_ranks", "by_reference", "shared_memory", "topk_logprobs")

    def __init__(self, *, config, **kwargs):
        section = HFPolicyConfig(**{**dict(config), "backend": "hf"})
        super().__init__(worker_class=self.worker, config=section, **kwargs)


class TrainsOnOtherScores(HFPolicyWorker):
    """Passes `altered` log-probabilities to the loss, and returns right ones from `get_logprobs`."""

    _trains = False

    def load(self):
        facts = super().load()
        score = self._scoring.score
        self._scoring.score = lambda inputs: self.altered(score(inputs)) if self._trains else score(inputs)
        return facts

    def train_step(self, *args, **kwargs):
        self._trains = True
        try:
            return super().train_step(*args, **kwargs)
        finally:
            self._trains = False
