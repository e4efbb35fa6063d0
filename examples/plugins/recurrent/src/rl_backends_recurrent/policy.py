"""The policy: only what is special about the model."""

from rl_backends_base import TorchPolicyWorker
from rl_backends_recurrent.model import RecurrentModel


class RecurrentPolicyWorker(TorchPolicyWorker):
    """One rank."""

    def build(self):
        return RecurrentModel.load(self.config.model_name)

    def logits(self, batch):
        return self.model(batch["input_ids"])[0]

    def save_weights(self, folder):
        if self.context.rank == 0:
            self.model.save(folder)
