"""A served model: the addition model of the examples, by the Transformers engine in this process."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from rl_serve.app import create_app
from rl_serve.engine import EngineThread
from rl_serve.sampling import Limits
from rl_serve.served_model import started_model

MODEL = Path(__file__).parents[2] / "examples/addition/model"


@pytest.fixture(scope="session")
def model():
    with started_model(str(MODEL), backend="hf", overrides=["policy.generation.max_new_tokens=16"], name="addition") as served:
        yield served


@pytest.fixture(scope="session")
def engine(model):
    thread = EngineThread(model.generation)
    yield thread
    thread.close()


@pytest.fixture(scope="session")
def client(model, engine):
    with TestClient(create_app(model, engine, limits=Limits())) as client:
        yield client
