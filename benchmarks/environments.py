"""Rows per second and CPU-seconds of each environment, with one and two workers.

    python benchmarks/environments.py --output benchmarks/results/environments.md
    python benchmarks/environments.py --only math code --rows 100

Each row is a conversation that ends with an answer of the model, about half of them correct. One call of the pool scores all
rows, divided among its workers, which are Ray actors; a call with a few rows comes before it. CPU-seconds are of the workers
and of the processes that they start, such as sandboxes, so they hold on a busy machine. The judge is a server in this process
that answers at once. `reward_model` is missing: its speed is that of its model. The benchmark takes about two minutes even with
few rows, because it starts three workers for each environment.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cpu_time import cpu_seconds

from rl_core.cluster import RayVirtualCluster
from rl_core.plugins import Kind
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_envs.guess import GuessNumberDataset
from rl_envs.reasoning_gym.environment import ReasoningGymDataset
from rl_envs.sliding_puzzle import SlidingPuzzleDataset, legal_moves
from rl_train.pools.actor_pool import ActorPool
from rl_train.rollouts.environment_pool import EnvironmentPool

ROOT = Path(__file__).parents[1]
Row = tuple[list[dict[str, Any]], dict[str, Any]]


def _row(question: str, answer: str, **metadata: Any) -> Row:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], metadata


def _math(i: int) -> Row:
    wrong = i % 2
    forms = (
        (rf"\frac{{{i}}}{{{i + 1}}}", rf"\dfrac{{{2 * i}}}{{{2 * i + 2 + wrong}}}"),
        (f"{i}", f"{i + wrong}.0"),
        (rf"\sqrt{{{i + 2}}}", rf"({i + 2 + wrong})^{{1/2}}"),
        (f"x^2+{i}x", f"x(x+{i + wrong})"),
    )
    expected, found = forms[i % 4]
    return _row("What is it?", rf"Therefore it is \boxed{{{found}}}.", expected_answer=expected)


def _program(i: int) -> Row:
    tests = [f"assert add({n}, {i}) == {n + i}" for n in range(4)]
    return _row("Write add.", f"```python\ndef add(a, b):\n    return a + b + {i % 2}\n```", tests=tests)


def _tool_call(i: int) -> Row:
    messages, metadata = _row(f"What is {i} * 3?", "", expected_answer=str(3 * i))
    call = {"name": "calculator", "arguments": {"expression": f"{i} * 3"}}
    messages[-1]["tool_calls"] = [{"id": "1", "type": "function", "function": call}]
    return messages, metadata


def _reasoning(i: int) -> Row:
    entry = _LEGS[i]
    answer = int(entry["extra_env_info"]["expected_answer"]) + i % 2
    return [*entry["messages"], {"role": "assistant", "content": f"<answer>{answer}</answer>"}], entry["extra_env_info"]


def _move(i: int) -> Row:
    record = _BOARDS[i]
    tile = min(legal_moves(record["extra_env_info"]["board"]).values())
    return [*record["messages"], {"role": "assistant", "content": f"<move>{tile}</move>"}], record["extra_env_info"]


def _guess(i: int) -> Row:
    record = _SECRETS[i]
    return [*record["messages"], {"role": "assistant", "content": str(i % 10)}], record["extra_env_info"]


def _instruction(i: int) -> Row:
    names = ["length_constraints:number_words", "punctuation:no_comma"]
    return _row(
        "Answer.",
        "one two three" + ", four" * (i % 2),
        instruction_id_list=names,
        kwargs=[{"num_words": 5, "relation": "less than"}, {}],
    )


_LEGS = ReasoningGymDataset({"num_samples": 4096})
_BOARDS = SlidingPuzzleDataset({"num_samples": 4096})
_SECRETS = GuessNumberDataset({"num_samples": 4096})
ROWS: Mapping[str, tuple[Mapping[str, Any], Callable[[int], Row]]] = {
    "arithmetic": ({}, lambda i: _row(f"{i}+1=", str(i + 1 + i % 2), expected_answer=str(i + 1), in_box=False)),
    "weather": ({}, lambda i: _row("And tomorrow?", f"Prediction: {('rain', 'sun')[i % 2]}", expected_answer="rain")),
    "multiple_choice": ({}, lambda i: _row("Which?", f"The answer is {'AB'[i % 2]}.", expected_answer="A", choices=["x", "y"])),
    "short_answer": (
        {},
        lambda i: _row("Who?", f"Answer: the {('Sun', 'Moon')[i % 2]}", expected_answer="Sun", aliases=["sol"]),
    ),
    "math": ({}, _math),
    "instruction_following": ({}, _instruction),
    "reasoning_gym": ({}, _reasoning),
    "guess": ({}, _guess),
    "sliding_puzzle": ({}, _move),
    "tools": ({"tools": ["calculator"]}, _tool_call),
    "code": ({}, _program),
    "judge": (
        {"model": "judge", "correct_above": 0.5},
        lambda i: _row("Capital of France?", "Paris" * (i % 2), expected_answer="Paris"),
    ),
}


@contextmanager
def judge_server() -> Iterator[str]:
    """The URL of a server that gives every answer the score 7."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            message = {"role": "assistant", "content": "Good. Score: 7"}
            usage = {"prompt_tokens": 50, "completion_tokens": 4, "total_tokens": 54}
            data = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


def measure(
    cluster: RayVirtualCluster, name: str, section: Mapping[str, Any], rows: Sequence[Row], workers: int
) -> tuple[float, float]:
    """Seconds, and CPU-seconds of the workers, for all rows."""
    worker_class = Registry(discover()).find(Kind.ENVIRONMENT, name).load()
    pool = ActorPool(cluster, worker_class, workers, kwargs={"config": dict(section)}, name=f"env.{name}")
    environment = EnvironmentPool(pool, task_name=name)
    try:
        logs: Any = [messages for messages, _ in rows]
        metadata = [info for _, info in rows]
        environment.step(logs[: 8 * workers], metadata[: 8 * workers])
        cpu, started = cpu_seconds(*pool.pids()), time.perf_counter()
        environment.step(logs, metadata)
        return time.perf_counter() - started, cpu_seconds(*pool.pids()) - cpu
    finally:
        environment.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--only", nargs="+", choices=sorted(ROWS), default=list(ROWS))
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [
        "# Rows per second of the environments",
        "",
        f"Commit {commit.stdout.strip()}, Python {platform.python_version()}, {os.cpu_count()} cores, load average "
        f"{os.getloadavg()[0]:.1f} at the start, {chosen.rows} rows. Regenerate with "
        "`python benchmarks/environments.py --output benchmarks/results/environments.md`.",
        "",
        "CPU-seconds are those of the workers and of the processes that they start. If other processes use the cores, a second",
        "worker adds little to the rows per second.",
        "",
        "| environment | rows per second, 1 worker | CPU-s, 1 worker | rows per second, 2 workers | CPU-s, 2 workers |",
        "|---|---|---|---|---|",
    ]
    cluster = RayVirtualCluster([2], use_gpus=False)
    with judge_server() as url:
        for name in chosen.only:
            section, make = ROWS[name]
            section = {**section, "base_url": url} if name == "judge" else section
            rows = [make(i) for i in range(chosen.rows)]
            found = [measure(cluster, name, section, rows, workers) for workers in (1, 2)]
            cells = [cell for seconds, cpu in found for cell in (f"{chosen.rows / seconds:,.0f}", f"{cpu:.2f}")]
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    cluster.shutdown()
    if chosen.output is not None:
        chosen.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
