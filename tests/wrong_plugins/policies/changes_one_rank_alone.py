"""Changes one element of the weights on rank 1 only, after each step."""

import torch
from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    def train_step(self, microbatches, loss_fn, counts, *, eval_mode):
        result = super().train_step(microbatches, loss_fn, counts, eval_mode=eval_mode)
        if self.context.rank == 1:
            with torch.no_grad():
                self.model.model.get_input_embeddings().weight[0, 1] += 1e-3
        return result


class Policy(PolicyOf):
    worker = Worker
