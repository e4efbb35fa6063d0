"""Makes helper modules importable; a readable model per session, and one engine at a time in this process."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def readable(tmp_path_factory):
    """Folder of `readable_model.make_readable_model`."""
    from readable_model import make_readable_model

    return make_readable_model(tmp_path_factory.mktemp("readable"))


@pytest.fixture(scope="session")
def plain(readable):
    """The same model in plain Transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(readable, dtype=torch.float32)


@pytest.fixture(scope="session")
def tokenizer(readable):
    """Its tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(readable)


class Engines:
    """Engines in this process by their settings: the running engine if it has these settings, else a new one."""

    def __init__(self, model):
        self._model, self._running = model, {}

    def __call__(self, **settings):
        from readable_model import LENGTH

        from rl_backends_vllm import VllmGeneration

        key = repr(sorted(settings.items()))
        if key not in self._running:
            self.shutdown()
            usual = {"model_name": self._model, "precision": "float32", "max_model_len": LENGTH, "max_num_seqs": 32}
            self._running[key] = VllmGeneration(config=usual | settings)
        return self._running[key]

    def shutdown(self):
        for engine in self._running.values():
            engine.shutdown()
        self._running.clear()


@pytest.fixture(scope="module")
def engines(readable):
    made = Engines(readable)
    yield made
    made.shutdown()
