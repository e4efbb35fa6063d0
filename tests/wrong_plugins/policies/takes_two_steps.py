"""Takes each optimizer step twice and reports one."""

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    def train_step(self, microbatches, loss_fn, counts, *, eval_mode):
        microbatches = list(microbatches)
        super().train_step(iter(microbatches), loss_fn, counts, eval_mode=eval_mode)
        result = super().train_step(iter(microbatches), loss_fn, counts, eval_mode=eval_mode)
        if not eval_mode:
            self.state.weight_version -= 1
        return result


class Policy(PolicyOf):
    worker = Worker
