"""`rlcore serve` over the addition model of the examples, and servers that answer by script."""

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from openai_servers import KEY, MODEL, Script, complete, engine_of, listening

from rl_serve.engine import EngineThread
from rl_serve.sampling import Limits
from rl_serve.served_model import started_model
from rl_serve.serving import create_app


@pytest.fixture(scope="session")
def served():
    """URL of `rlcore serve` over the Transformers engine, and the engine."""
    with started_model(str(MODEL), backend="hf", overrides=["policy.generation.max_new_tokens=16"], name="addition") as model:
        engine = EngineThread(model.generation)
        try:
            with listening(create_app(model, engine, limits=Limits(), api_keys=[KEY])) as url:
                yield url, model.generation
        finally:
            engine.close()


@pytest.fixture
def script():
    """Starts a scripted server; returns it and a function that connects an engine to it."""
    with ExitStack() as exits:

        def start(answer=complete, **keywords):
            server = Script(answer, **keywords)
            url = exits.enter_context(listening(server.app))

            def connect(**keys):
                return exits.enter_context(engine_of(url, **{"model": "m", **keys}))

            return server, connect

        yield start
