"""The threads that tokenize and decode end with the server."""

import threading

from starlette.testclient import TestClient

from rl_serve.app import create_app
from rl_serve.sampling import Limits


def text_threads():
    """The running threads for texts, of all servers in this process."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("rl-serve-text")}


def test_a_server_that_ends_leaves_none_of_its_text_threads(model, engine):
    before = text_threads()
    with TestClient(create_app(model, engine, limits=Limits())) as client:
        assert client.post("/v1/completions", json={"prompt": "1", "max_tokens": 1}).status_code == 200
        assert text_threads() - before
    assert not text_threads() - before


def test_an_application_that_starts_again_tokenizes_again(model, engine):
    app = create_app(model, engine, limits=Limits())
    for _ in range(2):
        with TestClient(app) as client:
            assert client.post("/v1/completions", json={"prompt": "1", "max_tokens": 1}).status_code == 200
