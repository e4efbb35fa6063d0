"""A second right control: multiplies the loss by four and divides the gradients by it, as it declares."""

from wrong_plugins.policies.base import OtherLoss, PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker

SCALE = 4.0


class Worker(HFPolicyWorker):
    declared = SCALE

    def load(self):
        facts = super().load()
        summed = self.parallel.sum_gradients

        def divided(parameters):
            summed(parameters)
            for parameter in parameters.values():
                parameter.grad /= SCALE

        self.parallel.sum_gradients = divided
        return {**facts, "gradient_scale": self.declared}

    def train_step(self, microbatches, loss_fn, counts, *, eval_mode):
        scaled = OtherLoss(loss_fn, lambda loss, metrics: (loss * SCALE, metrics))
        return super().train_step(microbatches, scaled, counts, eval_mode=eval_mode)


class Policy(PolicyOf):
    worker = Worker


class DynamicWorker(Worker):
    declared = "dynamic"


class Dynamic(PolicyOf):
    worker = DynamicWorker
