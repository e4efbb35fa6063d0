"""Divides the loss by the counts of a microbatch, not by those of the optimizer step."""

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.interfaces.worker import GlobalCounts


class Worker(HFPolicyWorker):
    def train_step(self, microbatches, loss_fn, counts, *, eval_mode):
        microbatches = list(microbatches)
        share = 1 / len(microbatches)
        own = GlobalCounts(valid_seqs=counts.valid_seqs * share, valid_toks=counts.valid_toks * share)
        return super().train_step(iter(microbatches), loss_fn, own, eval_mode=eval_mode)


class Policy(PolicyOf):
    worker = Worker
