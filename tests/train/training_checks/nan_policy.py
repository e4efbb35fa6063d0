"""A policy whose loss is not finite , as after an overflow."""

import torch
from wrong_plugins.policies.base import OtherLoss, PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    def train_step(self, microbatches, loss_fn, counts, *, eval_mode):
        overflown = OtherLoss(loss_fn, lambda loss, metrics: (loss * torch.inf, metrics))
        return super().train_step(microbatches, loss_fn if eval_mode else overflown, counts, eval_mode=eval_mode)


class Policy(PolicyOf):
    worker = Worker
