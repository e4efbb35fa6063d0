"""Passes log-probabilities to the loss one position too early."""

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    def load(self):
        facts = super().load()
        score = self._scoring.score
        self._scoring.score = lambda inputs: score(inputs).roll(-1, dims=1) if self._trains else score(inputs)
        return facts

    _trains = False

    def train_step(self, *args, **kwargs):
        self._trains = True
        try:
            return super().train_step(*args, **kwargs)
        finally:
            self._trains = False


class Policy(PolicyOf):
    worker = Worker
