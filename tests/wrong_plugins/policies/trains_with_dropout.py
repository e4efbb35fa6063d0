"""Trains with the dropout of the model's config."""

import torch
from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    _trains = False

    def load(self):
        facts, model = super().load(), self.model.model

        def dropped(module, arguments, embedded):
            return torch.nn.functional.dropout(embedded, model.config.attention_dropout, training=self._trains)

        model.get_input_embeddings().register_forward_hook(dropped)
        return facts

    def train_step(self, microbatches, loss_fn, counts, *, eval_mode):
        self._trains = not eval_mode
        try:
            return super().train_step(microbatches, loss_fn, counts, eval_mode=eval_mode)
        finally:
            self._trains = False


class Policy(PolicyOf):
    worker = Worker
