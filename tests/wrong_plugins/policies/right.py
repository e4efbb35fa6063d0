"""The right control: the Transformers policy as it is."""

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Policy(PolicyOf):
    worker = HFPolicyWorker
