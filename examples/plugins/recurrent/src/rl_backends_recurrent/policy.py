"""The policy: only what is special about the model."""

from rl_backends_base import TorchPolicyWorker
from rl_backends_recurrent.model import RecurrentModel
from rl_core.errors import CheckpointError


class RecurrentPolicyWorker(TorchPolicyWorker):
    """One rank."""

    def build(self):
        return RecurrentModel.load(self.config.model_name)

    def logits(self, batch):
        return self.model(batch["input_ids"])[0]

    def save_weights(self, folder):
        if self.context.rank == 0:
            self.model.save(folder)

    def load_weights(self, folder):
        try:
            self.model.load_state_dict(RecurrentModel.load(folder).state_dict())
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{folder} has no weights of this model: {error}") from error
