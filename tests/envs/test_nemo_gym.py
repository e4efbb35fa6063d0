"""The adapter of NeMo Gym against a small resources server, which has the protocol of its counter example."""

import json
import threading
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from environment_steps import step_checked

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import ConfigError
from rl_core.rendezvous.interfaces import free_port
from rl_envs.nemo_gym import NemoGymEnvironment

ROW = {"expected_count": 6, "initial_count": 3}


class Counter(BaseHTTPRequestHandler):
    """Counts per session, which a cookie identifies; `verify` compares the count with the expected one."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        cookies = SimpleCookie(self.headers.get("Cookie", ""))
        server, status = self.server, 200
        session = cookies["session"].value if "session" in cookies else str(len(server.counts))
        if self.path == "/seed_session":
            server.counts[session], reply = body["initial_count"], {}
        elif self.path == "/increment_counter":
            if "count" in body:
                server.counts[session] += body["count"]
                reply = {"success": True}
            else:
                status, reply = 422, {"detail": "count: Field required"}
        elif self.path == "/get_counter_value":
            reply = {"count": server.counts[session]}
        elif self.path == "/verify":
            server.verified.append(body)
            reply = {**body, "reward": float(server.counts[session] == body["expected_count"])}
        elif self.path == "/broken":
            status, reply = 500, {"detail": "Internal Server Error"}
        else:
            status, reply = 404, {"detail": "Not Found"}
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Set-Cookie", f"session={session}")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Counter) as running:
        running.counts, running.verified = {}, []
        running.url = f"http://127.0.0.1:{running.server_address[1]}"
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
    thread.join()


class Rollout:
    """One rollout: messages of the model, and what the environment replies."""

    def __init__(self, environment, name="a", row=ROW):
        self.environment, self.info = environment, {**row, "session_id": name}
        self.log = [{"role": "user", "content": "Add 1 and 2, then read the count."}]
        environment.reset(self.info)

    def say(self, content, *calls):
        made = [
            {"id": f"call_{len(self.log)}_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for number, (name, arguments) in enumerate(calls)
        ]
        self.log.append({"role": "assistant", "content": content, **({"tool_calls": made} if made else {})})
        returned = step_checked(self.environment, "counter", [self.log], [self.info])
        self.info = returned.metadata[0]
        self.failure = (returned.failures or [None])[0]
        self.ended = bool(returned.terminateds[0])
        if not self.ended:
            self.log += returned.observations[0]
        return [message["content"] for message in self.log if message["role"] == "tool"][-len(made) :] if made else []


def test_tools_run_in_the_session_of_the_rollout_and_the_server_gives_the_reward(server):
    environment = NemoGymEnvironment({"url": server.url})
    right, wrong = Rollout(environment), Rollout(environment, "b")
    assert right.say("", ("increment_counter", {"count": 1}), ("increment_counter", {"count": 2})) == ['{"success": true}'] * 2
    assert right.say("<think>6?</think>", ("get_counter_value", {})) == ['{"count": 6}']
    right.say("The count is 6.")
    wrong.say("The count is 6.")
    assert (right.ended, wrong.ended) == (True, True)
    assert [rollout.info["verified_reward"] for rollout in (right, wrong)] == [1.0, 0.0]
    _, metrics = environment.global_post_process_and_metrics(BatchedDataDict({"extra_env_info": [right.info, wrong.info]}))
    assert metrics == {"accuracy": 0.5, "tool_calls": 1.5}
    body = server.verified[0]
    assert body["expected_count"] == 6
    assert body["responses_create_params"] == {"input": [{"role": "user", "content": "Add 1 and 2, then read the count."}]}
    kinds = ["function_call", "function_call", "function_call_output", "function_call_output", "function_call"]
    output = body["response"]["output"]
    assert [item["type"] for item in output] == [*kinds, "function_call_output", "message"]
    assert [item["call_id"] for item in output[:4]] == ["call_1_0", "call_1_1"] * 2
    assert output[-1]["content"][0]["text"] == "The count is 6."
    for name in ("a", "b"):
        environment.close(name)


def test_the_model_reads_why_a_call_is_refused_and_cannot_call_the_verifier(server):
    environment = NemoGymEnvironment({"url": server.url})
    rollout = Rollout(environment)
    assert "Field required" in rollout.say("", ("increment_counter", {}))[0]
    assert "Not Found" in rollout.say("", ("reset_counter", {}))[0]
    for name in ("verify", "seed_session", "aggregate_metrics", "a/b"):
        assert rollout.say("", (name, {"initial_count": 6})) == [f"there is no tool {name!r}"]
    assert server.verified == []
    environment.close("a")


def test_after_the_last_turn_with_tools_the_rollout_is_verified(server):
    environment = NemoGymEnvironment({"url": server.url, "max_tool_turns": 1})
    assert environment.config.turns_needed == 2
    rollout = Rollout(environment)
    rollout.say("", ("increment_counter", {"count": 3}))
    rollout.say("", ("increment_counter", {"count": 3}))
    assert rollout.ended
    assert rollout.info["verified_reward"] == 1.0
    environment.close("a")


def test_an_error_of_the_server_fails_only_its_row(server):
    environment = NemoGymEnvironment({"url": server.url})
    broken, other = Rollout(environment), Rollout(environment, "b")
    broken.say("", ("broken", {}))
    assert "500" in broken.failure
    other.say("done")
    assert other.failure is None
    for name in ("a", "b"):
        environment.close(name)


def test_a_server_that_cannot_be_reached_is_an_error_of_the_session():
    environment = NemoGymEnvironment({"url": f"http://127.0.0.1:{free_port('127.0.0.1')}"})
    with pytest.raises(Exception, match=r"[Cc]onnect"):
        Rollout(environment)
    environment.close("a")
    with pytest.raises(ConfigError, match="url"):
        NemoGymEnvironment({"url": "127.0.0.1:80"})
