"""Measure the overhead of `VllmGeneration` on top of vLLM: tokens per second and start-up, against `vllm.LLM` in the same run.

    python benchmarks/vllm_overhead.py --model path/to/model --prompts 32 --samples 4 --new-tokens 64
    python benchmarks/vllm_overhead.py --model path/to/model --start-up

All sides get the same environment, engine arguments and requests (prompts, one seed per row, lengths), and take turns:
`vllm.LLM`; `VllmGeneration` in the same process; `VllmGeneration` as one replica over Ray. `vllm.LLM, unseeded` uses one random
generator for all rows instead of one per row, which shows the cost of the seeds. The model's end-of-sequence token is removed,
so every row has the same length. Before the measurement, greedy tokens confirm that all sides compute the same.

CPU-seconds are those of this process and all its children. On a shared machine they are more reliable than wall-clock time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cpu_time import cpu_seconds

PROMPT_TOKENS = 40


def without_end(model_name: str, folder: Path, dtype: str, *, with_tokenizer: bool = False) -> Path:
    """The model as a folder of Transformers with no end-of-sequence token."""
    import torch
    from transformers import GenerationConfig

    from rl_backends_hf.config import HFModelConfig
    from rl_backends_hf.model import load_model
    from rl_core.config.policy_sections import TokenizerConfig
    from rl_core.data.tokenizer import find_tokenizer

    model = load_model(model_name, options=HFModelConfig(), dtype=getattr(torch, dtype))
    model.config.eos_token_id = None
    model.generation_config = GenerationConfig()
    model.save_pretrained(folder)
    if with_tokenizer:
        find_tokenizer(model_name, TokenizerConfig()).save_pretrained(folder)
    return folder


def on_gpu() -> bool:
    """Whether all sides compute on a GPU."""
    import torch

    return torch.cuda.is_available()


def requests_of(options: argparse.Namespace, vocabulary: int) -> Any:
    """`prompts` random prompts, `samples` rows of each, with one seed per row."""
    import torch

    from rl_core.data.batched_data_dict import BatchedDataDict

    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, vocabulary, (options.prompts, PROMPT_TOKENS), generator=generator)
    rows = options.prompts * options.samples
    return BatchedDataDict(
        input_ids=prompts.repeat_interleave(options.samples, dim=0),
        input_lengths=torch.full((rows,), PROMPT_TOKENS),
        sample_seeds=torch.arange(1, rows + 1),
    )


def section(options: argparse.Namespace, model: str) -> dict[str, Any]:
    return {
        "model_name": model,
        "max_new_tokens": options.new_tokens,
        "vllm_cfg": {
            "precision": options.dtype,
            "max_model_len": PROMPT_TOKENS + options.new_tokens,
            "max_num_seqs": options.max_num_seqs,
            "kv_cache_gib": 1.0,
            "load_format": "auto",
            # Three engines share a GPU.
            "gpu_memory_utilization": 0.25,
            "enforce_eager": True,
        },
    }


Run = Callable[[bool], list[list[int]]]
"""Samples all rows, greedily or not, and returns their new tokens."""


def raw(options: argparse.Namespace, model: str, batch: Any) -> dict[str, Run]:
    """`vllm.LLM` with the same engine arguments as `VllmGeneration`."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model,
        dtype=options.dtype,
        max_model_len=PROMPT_TOKENS + options.new_tokens,
        max_num_seqs=options.max_num_seqs,
        kv_cache_memory_bytes=2**30,
        enforce_eager=True,
        gpu_memory_utilization=0.25,
        # With seeds, chunked prefill is an error on a CPU.
        enable_chunked_prefill=None if on_gpu() else False,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )
    rows = [{"prompt_token_ids": tokens} for tokens in batch["input_ids"].tolist()]
    seeds = batch["sample_seeds"].tolist()
    common: dict[str, Any] = {"max_tokens": options.new_tokens, "logprobs": 0, "detokenize": False}

    def run(greedy: bool, seeded: bool) -> list[list[int]]:
        drawn = {"temperature": 0.0} if greedy else {"temperature": 1.0}
        parameters = [SamplingParams(**common, **drawn, seed=seed if seeded and not greedy else None) for seed in seeds]
        return [list(output.outputs[0].token_ids) for output in engine.generate(rows, parameters, use_tqdm=False)]

    return {"vllm.LLM": lambda greedy: run(greedy, True), "vllm.LLM, unseeded": lambda greedy: run(greedy, False)}


def ours(engine: Any, batch: Any) -> Run:
    def run(greedy: bool) -> list[list[int]]:
        output = engine.generate(batch, greedy=greedy)
        return [ids[PROMPT_TOKENS:] for ids in output["output_ids"].tolist()]

    return run


@contextmanager
def sides(options: argparse.Namespace, model: str) -> Iterator[dict[str, Run]]:
    from transformers import AutoConfig

    from rl_backends_vllm import VllmGeneration
    from rl_core.cluster import RayVirtualCluster

    batch = requests_of(options, AutoConfig.from_pretrained(model).vocab_size)
    variants = raw(options, model, batch)
    here = VllmGeneration(None, section(options, model))
    cluster = RayVirtualCluster([1], use_gpus=on_gpu())
    there = VllmGeneration(cluster, section(options, model))
    try:
        yield variants | {"ours": ours(here, batch), "ours over Ray": ours(there, batch)}
    finally:
        for part in (there, cluster, here):
            part.shutdown()


def throughput(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model = str(without_end(options.model, Path(folder), options.dtype))
        with sides(options, model) as runs:
            return _in_turns(options, runs)


def _in_turns(options: argparse.Namespace, runs: dict[str, Run]) -> dict[str, Any]:
    greedy = {name: run(True) for name, run in runs.items()}
    apart = [name for name, tokens in greedy.items() if tokens != greedy["vllm.LLM"]]
    if apart:
        raise SystemExit(f"Greedy tokens of {', '.join(apart)} are not those of vllm.LLM: they do not do the same work.")
    tokens = options.prompts * options.samples * options.new_tokens
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(options.repeats + 1):
        for name, run in runs.items():
            started, used = time.perf_counter(), cpu_seconds()
            assert sum(map(len, run(False))) == tokens
            spent = time.perf_counter() - started
            print(f"repeat {repeat}: {name} {spent:.2f} s", file=sys.stderr, flush=True)
            if repeat > 0:
                seconds[name].append(spent)
                cpu[name].append(cpu_seconds() - used)
    return {
        name: {
            "tokens_per_s": tokens / statistics.median(seconds[name]),
            "seconds": seconds[name],
            "cpu_seconds": statistics.median(cpu[name]),
            # Compare runs that are close in time, so that other load on the machine affects both.
            "ratio": statistics.median(r / o for r, o in zip(seconds["vllm.LLM"], seconds[name], strict=True)),
        }
        for name in runs
    }


START = {
    "vllm.LLM": """
from vllm import LLM, SamplingParams
engine = LLM(model, enforce_eager=True) if EAGER else LLM(model)
engine.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=2, logprobs=0, detokenize=False), use_tqdm=False)
""",
    "ours": """
import torch
from rl_backends_vllm import VllmGeneration
from rl_core.data.batched_data_dict import BatchedDataDict
engine = VllmGeneration(None, {"model_name": model, "max_new_tokens": 2, "vllm_cfg": {"load_format": "auto"}})
engine.generate(BatchedDataDict(input_ids=torch.tensor([[5, 6, 7]]), input_lengths=torch.tensor([3])))
""",
}
"""Programs that start an engine and sample one row; `vllm.LLM` with and without compilation, which takes a minute."""
_REPORT = """
import json, psutil
print("REPORT" + json.dumps(1 + len(psutil.Process().children(recursive=True))), flush=True)
"""


def start_up(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds from interpreter start to the first row, and the number of processes then; each program runs in a new process."""
    from rl_backends_vllm.device import worker_environment

    # By default, vLLM uses nine tenths of the machine's memory for its KV cache.
    plain = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    variants = {
        "ours": (START["ours"], {**os.environ, **worker_environment(use_gpus=on_gpu())}),
        "vllm.LLM, KV size and enforce_eager": (START["vllm.LLM"].replace("EAGER", "True"), plain),
        "vllm.LLM, KV size": (START["vllm.LLM"].replace("EAGER", "False"), plain),
    }
    if options.without_compiling:
        del variants["vllm.LLM, KV size"]
    measured: dict[str, Any] = {name: {"seconds": [], "processes": 0} for name in variants}
    with tempfile.TemporaryDirectory() as folder:
        model = str(without_end(options.model, Path(folder), options.dtype, with_tokenizer=True))
        for _ in range(options.repeats):
            for name, (program, environment) in variants.items():
                seconds, processes = _started(f"model = {model!r}\n" + _guarded(program + _REPORT), environment)
                print(f"{name}: {seconds:.1f} s, {processes} processes", file=sys.stderr, flush=True)
                measured[name]["seconds"].append(seconds)
                measured[name]["processes"] = processes
    return measured


def _guarded(program: str) -> str:
    # vLLM's own worker processes import the program again.
    return "if __name__ == '__main__':\n" + "\n".join("    " + line for line in program.splitlines()) + "\n"


def _started(program: str, environment: dict[str, str]) -> tuple[float, int]:
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file, tempfile.TemporaryFile("w+") as errors:
        file.write(program)
        file.flush()
        started = time.perf_counter()
        child = subprocess.Popen([sys.executable, file.name], env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("REPORT"):
                seconds = time.perf_counter() - started
                child.stdout.read()
                child.wait()
                return seconds, int(line.removeprefix("REPORT"))
        errors.seek(0)
        raise SystemExit(f"No engine started:\n{errors.read()[-4000:]}")


def show(options: argparse.Namespace, results: dict[str, Any]) -> None:
    if options.start_up:
        for name, figures in results.items():
            runs = ", ".join(f"{value:.1f}" for value in figures["seconds"])
            median = statistics.median(figures["seconds"])
            print(f"{name:40} {median:6.1f} s to the first row, {figures['processes']} processes  (runs: {runs})")
        return
    for name, figures in results.items():
        runs = ", ".join(f"{value:.2f}" for value in figures["seconds"])
        print(
            f"{name:20} {figures['tokens_per_s']:8.1f} tokens/s  {figures['ratio']:5.3f} of vllm.LLM  "
            f"{figures['cpu_seconds']:6.2f} CPU-s   (seconds: {runs})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Transformers folder, or a GGUF file")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--start-up", action="store_true", help="measure start-up instead of speed")
    parser.add_argument("--without-compiling", action="store_true", help="skip the variant that compiles (minutes)")
    parser.add_argument("--json", type=Path, help="append the results, one JSON object per line")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside and not options.start_up:
        # OpenMP's runtime and threads are chosen when a process starts.
        from rl_backends_vllm.device import worker_environment

        environment = {**os.environ, **worker_environment(use_gpus=on_gpu()), "OMP_NUM_THREADS": str(options.threads)}
        sys.exit(subprocess.call([sys.executable, *sys.argv, "--inside"], env=environment))
    results = start_up(options) if options.start_up else throughput(options)
    settings = {key: str(value) for key, value in vars(options).items() if key not in ("json", "inside")}
    print(" ".join(f"{key}={value}" for key, value in settings.items()))
    show(options, results)
    if options.json is not None:
        with options.json.open("a") as file:
            file.write(json.dumps({**settings, "found": results}) + "\n")


if __name__ == "__main__":
    main()
