"""Its constructor has an argument that no config can give."""

from wrong_plugins.environments.base import TwoTurns


class Environment(TwoTurns):
    def __init__(self, config, tokenizer):
        super().__init__(config)
