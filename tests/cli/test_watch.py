"""`rlcore watch`: a live page on loopback that only reads, checks the Host header, and shows model output as text."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from command_line import rlcore

from rl_train.metrics.jsonl import JsonlTail
from rl_train.metrics.progress import PROGRESS
from rl_train.run_folders.run_names import newest_run
from rlcore_cli.watch import LivePage, WatchServer

HOSTILE = "</script><script>document.body.dataset.owned=1</script><img src=x onerror='document.body.dataset.owned=1'>"
RUNNING = {"status": {"state": "running", "pid": os.getpid(), "host": socket.gethostname()}}
CONFIG = {"grpo": {"max_num_steps": 3}}


@contextmanager
def served(find):
    page = LivePage(find, waiting="There is no run yet.")
    with WatchServer(page, port=0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Client(server)
        finally:
            server.shutdown()
            thread.join()


class Client:
    """Requests to a server, and their status, headers and text."""

    def __init__(self, server):
        self.server, self.url = server, server.url

    def get(self, path, *, method="GET", host=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=120)
        try:
            connection.request(method, path, headers={} if host is None else {"Host": host})
            reply = connection.getresponse()
            return reply.status, reply.headers, reply.read().decode()
        finally:
            connection.close()

    def state(self):
        return json.loads(self.get("/state")[2])


def opened(url, folder, *, seconds=8):
    """The document that Chromium has after some seconds by its virtual clock."""
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={folder}", f"--virtual-time-budget={seconds * 1000}", "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert "</html>" in done.stdout, done.stderr
    return done.stdout


needs_chromium = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="needs Chromium (Debian: apt-get install chromium)"
)


def hostile(step, row):
    texts = {"prompt": HOSTILE, "completion": HOSTILE, "answer": HOSTILE, "task": HOSTILE}
    return {**texts, "tokens": [1, 2], "logprobs": [-1, -2], "reward": 1.0, "group": HOSTILE, "turns": 1}


@needs_chromium
def test_hostile_text_in_every_part_of_the_page_is_shown_and_not_executed(write_run, tmp_path):
    run = write_run(
        tmp_path / "<img src=x onerror='document.body.dataset.owned=1'>",
        record=hostile,
        metrics=lambda step: {f"own/{HOSTILE}": step},
        config={"grpo": {"max_num_steps": 3, "note": HOSTILE}},
        status={"state": "failed", "error": HOSTILE},
    )
    (run / "logs").mkdir()
    (run / "logs" / "driver.log").write_text(HOSTILE + "\n")
    with served(lambda: run) as client:
        assert client.state()["log"] == HOSTILE + "\n"
        page = opened(client.url, tmp_path / "browser")
    body = re.search("<body[^>]*>", page).group()
    assert "data-owned" not in body
    escaped = HOSTILE.replace("<", "&lt;").replace(">", "&gt;")
    shown = [re.search(pattern, page, re.DOTALL) for pattern in ('id="groups".*?<script', 'id="log-text".*?</pre>')]
    assert all(escaped in part.group() for part in shown)


@needs_chromium
def test_an_open_page_shows_new_steps_and_rollouts_and_the_end_of_the_run(write_run, tmp_path):
    run = write_run(tmp_path / "run", steps=1, config=CONFIG, **RUNNING)
    requests = []

    def find():
        requests.append(1)
        if len(requests) == 3:  # the page, its rollouts and its first state were sent
            write_run(run, steps=3, config=CONFIG)
        return run

    with served(find) as client:
        page = opened(client.url, tmp_path / "browser")
    assert 'id="sentence">Finished: 3 of 3 steps.' in page
    assert "4 of 4 rollouts of step 3" in page  # a page that shows the newest step follows it
    assert re.findall("<option>([0-9]+)</option>", page) == ["1", "2", "3"]
    assert "(step 3)" not in page
    assert "at step 1" in page


@needs_chromium
def test_an_open_page_without_a_run_shows_the_first_one_that_starts(write_run, tmp_path):
    runs, requests = tmp_path / "runs", []

    def find():
        requests.append(1)
        if len(requests) == 3:
            write_run(runs / "late", steps=2, config=CONFIG, **RUNNING)
        return newest_run(runs)

    with served(find) as client:
        page = opened(client.url, tmp_path / "browser")
    assert ">late</h1>" in page
    assert "4 of 4 rollouts of step 2" in page


def test_requests_for_another_host_name_are_refused(write_run, tmp_path):
    run = write_run(tmp_path / "run")
    with served(lambda: run) as client:
        port = client.server.server_port
        for path in ("/", "/state", "/rollouts/1", "/nothing"):
            for host in ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", "localhost.evil", ""):
                status, _, text = client.get(path, host=host)
                assert (status, "Host header" in text) == (403, True), host
        for host in ("localhost", f"localhost:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", f"[::1]:{port}"):
            assert client.get("/state", host=host)[0] == 200, host


def test_the_server_listens_on_loopback_and_changes_nothing(write_run, tmp_path):
    run = write_run(tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with served(lambda: run) as client:
        assert client.server.server_address[0] == "127.0.0.1"
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert client.get("/", method=method)[0] == 501
        for path in ("/", "/state", "/rollouts/1"):
            status, headers, _ = client.get(path)
            assert status == 200
            assert "default-src 'none'" in headers["Content-Security-Policy"]
            assert "Access-Control-Allow-Origin" not in headers
        for path in ("/config.yaml", "/../run/config.yaml", "/rollouts/9", "/rollouts/../1", "/rollouts/", "/?x"):
            assert client.get(path)[0] == 404, path
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_progress_is_shown_while_a_run_is_in_progress_only(write_run, tmp_path):
    run = write_run(tmp_path / "run", steps=2, config=CONFIG, **RUNNING)
    (run / PROGRESS).write_text("step 3/3  rollout 4 s  1/4 rollouts")
    with served(lambda: run) as client:
        assert client.state()["progress"] == "step 3/3  rollout 4 s  1/4 rollouts"
        assert "1 steps, at the recent speed" in client.get("/")[2]
        write_run(run, steps=3, config=CONFIG)
        assert client.state() | {"version": ""} == {
            "run": str(run),
            "version": "",
            "state": "finished",
            "sentence": "Finished: 3 of 3 steps.",
            "progress": "",
            "log": "Nothing logged.",
        }


def test_a_killed_process_is_noticed_although_no_file_changes(write_run, tmp_path):
    with subprocess.Popen(["sleep", "600"]) as process:
        status = {"state": "running", "pid": process.pid, "host": socket.gethostname()}
        run = write_run(tmp_path / "run", steps=2, config=CONFIG, status=status)
        with served(lambda: run) as client:
            assert client.state()["state"] == "running"
            process.kill()
            process.wait()
            assert client.state()["state"] == "vanished"


def test_a_deleted_run_folder_is_reported_and_found_again(write_run, tmp_path):
    run = write_run(tmp_path / "run", steps=2, config=CONFIG, **RUNNING)
    with served(lambda: run) as client:
        assert client.state()["state"] == "running"
        shutil.rmtree(run)
        state = client.state()
        assert (state["state"], state["sentence"]) == ("unreadable", f"The run folder {run} does not exist any more.")
        assert "Reward" in client.get("/")[2]  # the last contents stay
        assert client.get("/rollouts/1")[0] == 404
        write_run(run, steps=1, config=CONFIG, **RUNNING)
        assert client.state()["sentence"] == "Running: 1 of 3 steps so far."


def test_a_corrupt_file_is_named_and_read_again_when_it_is_repaired(write_run, tmp_path):
    run = write_run(tmp_path / "run", steps=2)
    lines = (run / "metrics.jsonl").read_text()
    with served(lambda: run) as client:
        (run / "metrics.jsonl").write_text("{]\n" + lines)
        assert "metrics.jsonl:1: invalid JSON" in client.state()["sentence"]
        (run / "rollouts" / "step_000001.jsonl").write_text("{]\n")
        (run / "metrics.jsonl").write_text(lines)
        assert client.get("/rollouts/1")[0] == 500
        assert "step_000001.jsonl:1: invalid JSON" in client.get("/rollouts/1")[2]
        assert client.state()["sentence"] == "Finished: 2 of 2 steps."


def test_the_newest_run_is_the_one_that_started_last(write_run, tmp_path):
    assert newest_run(tmp_path) is newest_run(tmp_path / "nowhere") is None
    for name, started in {"a": 300, "b": 200}.items():
        os.utime(write_run(tmp_path / name) / "config.yaml", (started, started))
    assert newest_run(tmp_path) == tmp_path / "a"
    os.utime(tmp_path / "b" / "metrics.jsonl", (400, 400))  # written by an older run that is still in progress
    assert newest_run(tmp_path) == tmp_path / "a"


def test_each_line_is_read_once_and_an_incomplete_one_when_it_is_complete(tmp_path):
    path = tmp_path / "lines.jsonl"
    tail = JsonlTail(path)
    assert tail.read() == ([], False)
    path.write_text('{"a": 1}\n{"a": 2')
    assert tail.read() == ([(1, {"a": 1})], False)
    assert tail.read() == ([], False)
    with path.open("a") as file:
        file.write('}\n{"a": 3}\n')
    assert tail.read() == ([(2, {"a": 2}), (3, {"a": 3})], False)
    (tmp_path / "new").write_text('{"a": 4}\n')
    (tmp_path / "new").replace(path)
    assert tail.read() == ([(1, {"a": 4})], True)
    path.unlink()
    assert tail.read() == ([], True)


def test_a_resumed_run_that_repeats_steps_replaces_them(write_run, tmp_path):
    run = write_run(tmp_path / "run", steps=4, metrics=lambda step: {"reward/mean": 1.0})
    with served(lambda: run) as client:
        assert "<b>1</b><small>1 at step 1</small>" in client.get("/")[2]
        shutil.rmtree(run / "rollouts")
        write_run(run, steps=2, metrics=lambda step: {"reward/mean": 2.0}, config=CONFIG, **RUNNING)
        assert "<b>2</b><small>2 at step 1</small>" in client.get("/")[2]
        assert client.get("/rollouts/4")[0] == 404


def test_ctrl_c_ends_the_command_without_a_traceback(write_run, tmp_path):
    write_run(tmp_path / "runs" / "sums")
    command = [sys.executable, "-m", "rlcore_cli.main", "watch"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        try:
            line = watching.stdout.readline()
            port = int(re.fullmatch(r"runs/sums: http://127\.0\.0\.1:(\d+)/ \(Ctrl-C ends\)\n", line).group(1))
            with socket.create_connection(("127.0.0.1", port)):
                watching.send_signal(signal.SIGINT)
                assert watching.wait(timeout=120) == 0
        finally:
            watching.kill()
        assert watching.stderr.read() == ""


def test_a_wrong_run_or_a_used_port_is_a_user_error(write_run, tmp_path):
    run = write_run(tmp_path / "run")
    result = rlcore("watch", tmp_path / "nowhere")
    assert (result.returncode, result.stdout, "does not exist" in result.stderr) == (2, "", True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = rlcore("watch", run, "--port", port)
    assert (result.returncode, result.stdout) == (2, "")
    assert f"error: --port {port} cannot be used" in result.stderr
