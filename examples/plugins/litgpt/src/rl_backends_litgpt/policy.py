"""The policy: LitGPT's model, and its files."""

from rl_backends_base import TorchPolicyWorker
from rl_backends_litgpt import model as litgpt_model
from rl_core.errors import CheckpointError


class LitGPTPolicyWorker(TorchPolicyWorker):
    """One rank."""

    def build(self):
        return litgpt_model.load(self.config.model_name)

    def logits(self, batch):
        return self.model(batch["input_ids"])[..., : self.model.config.vocab_size]  # the rest pads the matrix

    def save_weights(self, folder):
        if self.context.rank == 0:
            litgpt_model.save(self.model, folder)

    def load_weights(self, folder):
        try:
            self.model.load_state_dict(litgpt_model.read_weights(folder))
        except RuntimeError as error:
            raise CheckpointError(f"{folder} is of another model: {error}") from error
