"""The engine: each row in flight has a state of fixed size instead of keys and values."""

import torch
from torch.nn.utils.rnn import pack_sequence

from rl_backends_base import TokenwiseWorker
from rl_backends_recurrent.model import RecurrentModel


class RecurrentEngineWorker(TokenwiseWorker):
    """One replica. `row.state` is the state [layers, hidden] after the row's latest token."""

    def build(self):
        return RecurrentModel.load(self.config.model_name)

    def facts(self):
        return {"vocab_size": self.model.settings["vocab_size"], "max_model_len": 2**20}

    def prefill(self, rows):
        sequences = [self.model.embedding(self._ids(row.sequence)) for row in rows]
        return self._keep_states(rows, self.model.layers(pack_sequence(sequences, enforce_sorted=False))[1])

    def decode(self, rows):
        latest = self.model.embedding(self._ids([[row.tokens[-1]] for row in rows]))
        return self._keep_states(rows, self.model.layers(latest, torch.stack([row.state for row in rows], dim=1))[1])

    def _keep_states(self, rows, states):
        for row, state in zip(rows, states.unbind(1), strict=True):
            row.state = state
        return self.model.head(states[-1])

    def _ids(self, tokens):
        return torch.tensor(tokens, device=self.context.device)
