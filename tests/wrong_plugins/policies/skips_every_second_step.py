"""Does not take every second optimizer step that it reports."""

from dataclasses import replace

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    _steps = 0

    def train_step(self, microbatches, loss_fn, counts, *, eval_mode):
        self._steps += not eval_mode
        if eval_mode or self._steps % 2:
            return super().train_step(microbatches, loss_fn, counts, eval_mode=eval_mode)
        result = super().train_step(microbatches, loss_fn, counts, eval_mode=True)
        self.state.weight_version += 1
        return replace(result, grad_norm=1.0, lr=0.01)


class Policy(PolicyOf):
    worker = Worker
