"""Resumes from the weights of a checkpoint in bfloat16, without the float32 copies that its optimizer steps with."""

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    def load_training_state(self, folder):
        super().load_training_state(folder)
        self.state.masters.copy_from_model()


class Policy(PolicyOf):
    worker = Worker
