"""The model: an embedding, GRU layers (https://arxiv.org/abs/1406.1078) and a head; and its folder."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import nn


class RecurrentModel(nn.Module):
    """Predicts the next token from a state of fixed size, so that sampling costs the same at every position.

    Args:
        vocab_size: number of tokens.
        hidden_size: width of each layer.
        num_layers: number of layers.
    """

    def __init__(self, *, vocab_size: int, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        self.settings = {"vocab_size": vocab_size, "hidden_size": hidden_size, "num_layers": num_layers}
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.GRU(hidden_size, hidden_size, num_layers, batch_first=True)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, input_ids, state=None):
        """Logits [b, T, vocabulary] and the state [layers, b, hidden] after the last position."""
        hidden, state = self.layers(self.embedding(input_ids), state)
        return self.head(hidden), state

    def save(self, folder: Path) -> None:
        """Write weights and settings."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.state_dict(), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.settings))

    @classmethod
    def load(cls, folder) -> "RecurrentModel":
        """The model of a folder that `save` wrote."""
        model = cls(**json.loads((Path(folder) / "config.json").read_text()))
        model.load_state_dict(load_file(Path(folder) / "model.safetensors"))
        return model
