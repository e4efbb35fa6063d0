"""Steps with the mean of the gradients of all ranks, and reports the norm of their sum."""

from dataclasses import replace

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    def load(self):
        facts = super().load()
        summed = self.parallel.sum_gradients

        def averaged(parameters):
            summed(parameters)
            for parameter in parameters.values():
                parameter.grad /= self.context.world_size

        self.parallel.sum_gradients = averaged
        return facts

    def train_step(self, microbatches, loss_fn, counts, *, eval_mode):
        result = super().train_step(microbatches, loss_fn, counts, eval_mode=eval_mode)
        return replace(result, grad_norm=result.grad_norm * self.context.world_size)


class Policy(PolicyOf):
    worker = Worker
