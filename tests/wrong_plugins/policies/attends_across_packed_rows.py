"""Packs rows without borders, so each row sees those before it."""

from dataclasses import replace

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    def load(self):
        facts = super().load()
        form = self.form
        self.form = lambda *args, **kwargs: replace(form(*args, **kwargs), attention={})
        return facts


class Policy(PolicyOf):
    worker = Worker
    capabilities = (*PolicyOf.capabilities, "sequence_packing")
