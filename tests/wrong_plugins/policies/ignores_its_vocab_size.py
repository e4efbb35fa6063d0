"""Scores all rows of the LM head, whatever `vocab_size` says."""

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Policy(PolicyOf):
    worker = HFPolicyWorker

    def __init__(self, *, config, **kwargs):
        super().__init__(config=config.model_copy(update={"vocab_size": None}), **kwargs)
