"""Tools of a real MCP server, started over stdio: names, schemas, calls, errors, timeouts, and servers that end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from environment_steps import step_checked

from rl_core.errors import ConfigError
from rl_core.rendezvous.interfaces import free_port
from rl_envs.config import ToolsEnvironmentConfig
from rl_envs.tools.environment import ToolsEnvironment
from rl_envs.tools.mcp_servers import _LastErrors

pytest.importorskip("mcp", reason="pip install 'rl-envs[mcp]'")
COMMAND = [sys.executable, str(Path(__file__).with_name("mcp_example_server.py"))]
EXAMPLE = {"command": COMMAND, "env": {"GREETING": "hello"}, "start_timeout_s": 240.0}


@pytest.fixture(scope="module")
def environment():
    config = {"tools": ["calculator"], "mcp_servers": {"example": EXAMPLE}, "call_timeout_s": 120.0}
    opened = ToolsEnvironment(config)
    yield opened
    opened.shutdown()


def turn(environment, **calls):
    """One turn of several rollouts, each with its calls; returns the texts of the results and the result of `step`."""
    logs = [
        [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": f"{number:09}", "type": "function", "function": {"name": name, "arguments": arguments}}
                    for number, (name, arguments) in enumerate(own)
                ],
            }
        ]
        for own in calls.values()
    ]
    made = step_checked(environment, "tools", logs, [{"session_id": name, "expected_answer": "1"} for name in calls])
    return [[message["content"] for message in each] for each in made.observations], made


def test_names_descriptions_and_schemas_come_from_the_server(environment):
    assert list(environment.tools) == ["calculator", "add", "remember", "fail", "sleep", "crash", "count"]
    assert environment.tools["add"].spec["function"] == {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}},
            "required": ["a"],
        },
    }


def test_calls_return_texts_and_errors_that_the_model_reads(environment):
    [texts], made = turn(
        environment,
        a=[("add", {"a": 1}), ("add", {"a": "x"}), ("add", {}), ("fail", {}), ("calculator", {"expression": "2*3"})],
    )
    assert texts == [
        "2",
        "Error: wrong arguments of add: a: 'x' is not of type 'integer'",
        "Error: wrong arguments of add: arguments: 'a' is a required property",
        "Error: ToolError: Error executing tool fail: out of stock",
        "6",
    ]
    assert made.metadata[0]["tool_use"]["problems"] == {"wrong_arguments": 2, "exception": 1}


def test_a_list_is_read_as_json_whatever_its_length(environment):
    [texts], _ = turn(environment, a=[("count", {"end": end}) for end in range(3)])
    assert texts == ["[]", '["0"]', '["0", "1"]']


def test_a_server_gets_its_own_environment_variables_and_is_shared_by_rollouts(environment, monkeypatch):
    texts, _ = turn(environment, a=[("remember", {"note": "x"})])
    assert texts == [["['x'] hello None"]]
    texts, _ = turn(environment, b=[("remember", {"note": "y"})])
    assert texts == [["['x', 'y'] hello None"]]


def test_a_call_that_does_not_finish_is_a_timeout_and_the_server_stays_usable(environment, monkeypatch):
    with monkeypatch.context() as short:
        short.setattr(environment, "_runner", type(environment._runner)(**{**vars(environment._runner), "timeout_s": 0.5}))
        [texts], made = turn(environment, a=[("sleep", {})])
    assert texts == ["Error: sleep did not finish within 0.5 seconds"]
    assert made.scored.tolist() == [True]
    assert turn(environment, a=[("add", {"a": 2})])[0] == [["3"]]


def test_a_server_that_ends_makes_its_row_unscored_and_is_started_again(environment, caplog):
    _, made = turn(environment, a=[("crash", {})], b=[("calculator", {"expression": "1+1"})])
    assert (made.scored.tolist(), made.terminateds.tolist()) == ([False, True], [1.0, 0.0])
    assert "the MCP server 'example' does not work: the server ended" in caplog.text
    assert "a fatal error" in caplog.text
    [[kept]], made = turn(environment, b=[("remember", {"note": "new"})])
    assert (kept, made.scored.tolist()) == ("['new'] hello None", [True])


def test_an_error_quotes_what_a_server_wrote_just_before_it_ended(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)  # the thread that reads is late
    errors = _LastErrors()
    errors.file.write("x" * 5000 + "\na fatal error\n")
    errors.file.flush()
    assert errors.text().endswith("x | a fatal error")
    errors.close()
    assert errors.text().endswith("a fatal error")
    os.close(errors._reader)


def test_the_main_process_lists_the_selected_tools():
    config = ToolsEnvironmentConfig(tools=(), mcp_servers={"example": {**EXAMPLE, "tools": ["remember", "add"]}})
    assert [spec["function"]["name"] for spec in ToolsEnvironment.offered_tools(config)] == ["remember", "add"]


ANSWERS_ONE_METHOD = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    reply = {"jsonrpc": "2.0", "id": request.get("id")}
    if request["method"] == "initialize":
        info = {"name": "silent", "version": "1"}
        version = request["params"]["protocolVersion"]
        reply["result"] = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    elif request["method"] == "tools/list" and sys.argv[1] == "endless":
        reply["result"] = {"tools": [], "nextCursor": "more"}
    elif request["method"] == "tools/list" and sys.argv[1] == "refused" or request["method"] == "server/discover":
        reply["error"] = {"code": -32601, "message": "no such method"}
    else:
        continue
    print(json.dumps(reply), flush=True)
"""


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("silent", "not within 5 seconds"),
        pytest.param(
            "endless", "not within 5 seconds", marks=pytest.mark.full("waits 5 seconds; the silent server runs in CI")
        ),
        ("refused", "no such method"),
    ],
)
def test_a_server_that_starts_and_does_not_list_its_tools_is_refused(answer, says, tmp_path):
    (tmp_path / "server.py").write_text(ANSWERS_ONE_METHOD)
    server = {"command": [sys.executable, str(tmp_path / "server.py"), answer], "start_timeout_s": 5.0}
    with pytest.raises(ConfigError, match=rf"mcp_servers.example: the server .* did not list its tools: {says}"):
        ToolsEnvironment({"tools": [], "mcp_servers": {"example": server}})


@pytest.mark.parametrize(
    ("server", "says"),
    [
        ({"command": ["/nonexistent/server"]}, "mcp_servers.example: the server .* did not start: FileNotFoundError"),
        ({"command": [sys.executable, "-c", "raise SystemExit('no license')"]}, "did not start: .*no license"),
        ({"command": ["sleep", "600"], "start_timeout_s": 0.2}, "did not start: no answer within 0.2 seconds"),
        ({"comand": ["x"]}, "mcp_servers.example has no key 'comand'. Did you mean 'command'?"),
        ({"command": 3}, "mcp_servers.example.command: must be a list of text; found 3"),
        ({}, "set either command or url"),
        ({"command": ["x"], "url": "http://localhost"}, "set either command or url"),
        ({"url": "http://localhost", "env": {"A": "b"}}, "env applies to command"),
        ({"command": ["x"], "headers": {"A": "b"}}, "headers apply to url"),
    ],
)
def test_servers_that_cannot_be_used_are_refused(server, says):
    with pytest.raises(ConfigError, match=says):
        ToolsEnvironment({"tools": [], "mcp_servers": {"example": server}})


def test_a_missing_package_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"pip install 'rl-envs\[mcp\]'"):
        ToolsEnvironment({"mcp_servers": {"example": {"command": ["x"]}}})


@pytest.mark.full("starts three servers; CI has the server that rollouts share")
def test_each_rollout_can_have_its_own_server_that_ends_with_it():
    environment = ToolsEnvironment(
        {"tools": [], "mcp_servers": {"own": {**EXAMPLE, "per_rollout": True}}, "call_timeout_s": 240.0}
    )
    try:
        note = [("remember", {"note": "x"})]
        assert turn(environment, a=note, b=note)[0] == [["['x'] hello None"]] * 2
        assert turn(environment, a=note)[0] == [["['x', 'x'] hello None"]]
        environment.close("a")
        assert list(environment._servers[0]._connections) == ["b"]
    finally:
        environment.shutdown()


@pytest.mark.full("a server over HTTP; CI has the same calls over stdio")
def test_a_server_can_be_reached_at_a_url():
    port = free_port("127.0.0.1")
    with subprocess.Popen([*COMMAND, str(port)]) as process:
        try:
            wait_for(port)
            server = {"url": f"http://127.0.0.1:{port}/mcp", "tools": ["add", "crash"], "headers": {"X-Team": "blue"}}
            environment = ToolsEnvironment({"tools": [], "mcp_servers": {"web": server}, "call_timeout_s": 120.0})
            try:
                assert turn(environment, a=[("add", {"a": 1, "b": 2})])[0] == [["3"]]
                _, made = turn(environment, a=[("crash", {})])
                assert made.scored.tolist() == [False]
            finally:
                environment.shutdown()
        finally:
            process.kill()


def wait_for(port):
    end = time.monotonic() + 240.0
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            assert time.monotonic() < end, "the server did not start"
            time.sleep(0.1)
