"""Makes the modules beside the tests importable; a readable model once a session, and one engine at a time in this process."""

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
    """The same model by Transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(readable, dtype=torch.float32)


@pytest.fixture(scope="session")
def tokenizer(readable):
    """Its tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(readable)


@pytest.fixture(scope="module")
def engines(readable):
    """Engines in this process by their settings: the one that runs, where it has them, else another in its place."""
    from readable_model import LENGTH

    from rl_backends_vllm import VllmGeneration

    running = {}

    def engine(**settings):
        key = repr(sorted(settings.items()))
        if key not in running:
            for other in running.values():
                other.shutdown()
            running.clear()
            config = {"model_name": readable, "precision": "float32", "max_model_len": LENGTH, "max_num_seqs": 32, **settings}
            running[key] = VllmGeneration(config=config)
        return running[key]

    yield engine
    for last in running.values():
        last.shutdown()
