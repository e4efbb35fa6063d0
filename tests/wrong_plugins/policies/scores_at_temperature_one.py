"""Scores and trains at temperature 1, whatever the temperature of sampling."""

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Policy(PolicyOf):
    worker = HFPolicyWorker

    def __init__(self, *, config, **kwargs):
        super().__init__(config=config.model_copy(update={"generation": None}), **kwargs)
