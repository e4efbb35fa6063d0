"""Decoding with OpenMP threads that wait by sleeping, by spinning for half a millisecond, or as OpenMP does by default.

    python benchmarks/thread_waiting.py --rounds 2

Each measurement is a separate process, because OpenMP reads its settings when it is loaded. The settings take turns in each
round. Reported are wall-clock and CPU-milliseconds per token step, and how often a thread of the process went to sleep.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time

SETTINGS: dict[str, dict[str, str]] = {
    "2 threads, always sleep": {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"},
    "2 threads, half a millisecond": {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"},
    "2 threads, default of OpenMP": {"OMP_NUM_THREADS": "2"},
    "1 thread": {"OMP_NUM_THREADS": "1"},
}


def measure(rows: int, prompt_tokens: int, new_tokens: int) -> dict[str, float]:
    """Milliseconds and sleeps per token step, without the prefill: the difference of a long and a short call."""
    import torch
    import transformers
    from generation_vs_transformers import SMOLLM2_135M, rlcore_generate

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMOLLM2_135M)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.config.eos_token_id = None
    prompts = torch.randint(3, 1000, (rows, prompt_tokens)).tolist()
    short, long = (rlcore_generate(model, prompts, torch.full((rows,), length)) for length in (13, 13 + new_tokens))
    spent = []
    for call in (short, short, long):  # the first call warms up
        before, wall = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        call()
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        spent.append((1000 * (time.perf_counter() - wall), 1000 * cpu, after.ru_nvcsw - before.ru_nvcsw))
    names = ("wall_ms", "cpu_ms", "sleeps")
    return {name: (spent[2][number] - spent[1][number]) / new_tokens for number, name in enumerate(names)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=74)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--one", action="store_true", help="measure in this process, with the environment as it is")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.rows, arguments.prompt_tokens, arguments.new_tokens)))
        return
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    for number in range(arguments.rounds):
        for name in list(SETTINGS)[:: 1 if number % 2 else -1]:
            command = [sys.executable, __file__, *sys.argv[1:], "--one"]
            done = subprocess.run(command, env=inherited | SETTINGS[name], capture_output=True, text=True, check=True)
            each = json.loads(done.stdout.splitlines()[-1])
            figures = f"{each['wall_ms']:.0f} ms, {each['cpu_ms']:.0f} CPU-ms, {each['sleeps']:.0f} sleeps"
            print(f"round {number + 1}, {name}: {figures}")


if __name__ == "__main__":
    main()
