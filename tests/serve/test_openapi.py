"""Requests generated from the OpenAPI document never fail with status 500."""

from dataclasses import replace

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode

from rl_serve.backend import Backend
from rl_serve.sampling import Limits
from rl_serve.serving import create_app, create_proxy_app
from rl_serve.settings import BackendSection

CASES = 300
MORE = [pytest.mark.full("the same with thousands of cases; CI runs 300 of each application")]
OPERATIONS = 6
DOWN = {502, 503}


@pytest.fixture(scope="module")
def quick_model(model):
    """The addition model, with completions of at most two tokens."""
    return replace(model, max_new_tokens=2)


def cases_of(operation):
    """Requests that fit the document, and bodies that do not."""
    valid = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    if operation.method != "post":
        return valid
    return valid | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)


def statuses_of(app, count):
    """The status of each response to generated requests, over all operations."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    found = []
    for result in schema.get_all_operations():
        operation = result.ok()

        @hypothesis.settings(
            max_examples=count // OPERATIONS,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(case=cases_of(operation))
        def send(case):
            response = case.call(timeout=120)  # the default of 10 s is too short on a busy machine
            found.append(response.status_code)
            assert response.status_code < 500 or response.status_code in DOWN, (case.as_curl_command(), response.text)
            assert response.status_code < 400 or "error" in response.json() or case.path == "/health", response.text

        send()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("count", [CASES, pytest.param(5000, marks=MORE)])
def test_a_local_model_answers_generated_requests_without_server_errors(quick_model, engine, count):
    found = statuses_of(create_app(quick_model, engine, limits=Limits()), count)
    assert len(found) >= count // 2
    assert not DOWN & set(found)
    assert {200, 400} <= set(found)


@pytest.mark.slow
@pytest.mark.parametrize("count", [CASES, pytest.param(5000, marks=MORE)])
def test_a_proxy_answers_generated_requests_and_reports_a_backend_that_is_down(quick_model, engine, serve_http, count):
    port = serve_http(create_app(quick_model, engine, limits=Limits()))
    backend = Backend(BackendSection(host="127.0.0.1", port=port, max_retries=0), concurrency=8)
    found = statuses_of(create_proxy_app(backend, name="proxy", limits=Limits()), count)
    assert not DOWN & set(found)
    assert {200, 400} <= set(found)
