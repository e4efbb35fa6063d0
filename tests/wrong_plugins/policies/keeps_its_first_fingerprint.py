"""Reports the fingerprint of its first weights."""

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    _first = None

    def weight_fingerprint(self, *, dtypes=None, kind=None):
        self._first = self._first or super().weight_fingerprint(dtypes=dtypes, kind=kind)
        return self._first


class Policy(PolicyOf):
    worker = Worker
