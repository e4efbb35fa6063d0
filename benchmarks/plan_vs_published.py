"""Compares the time that `rlcore plan --gpu NAME` computes with published figures of steps, training and sampling on GPUs.

    python benchmarks/plan_vs_published.py    # writes results/plan_vs_published.json and .md

Needs no GPU and no weights. The figures, and the assumptions in `rl_train/plan/time_plan.py` and the
engine of `hf`, were chosen before any of them was computed. One assumption was corrected afterwards: at first, all completions
had the mean length, so complete steps were computed as 0.20 to 0.57 of the published time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.config.loader import load_config
from rl_train.plan.planner import resolved
from rl_train.plan.time_plan import GPUS, engine_time, plan_time

RESULTS = Path(__file__).parent / "results" / "plan_vs_published"
LLAMA = {"model_type": "llama", "max_position_embeddings": 131072, "tie_word_embeddings": False}
QWEN = {
    "model_type": "qwen3",
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama-2-7B": LLAMA
    | {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 11008, "vocab_size": 32000}
    | {"num_attention_heads": 32, "num_key_value_heads": 32},
    "Llama-2-70B": LLAMA
    | {"hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672, "vocab_size": 32000}
    | {"num_attention_heads": 64, "num_key_value_heads": 8},
    "Llama-3.1-8B": LLAMA
    | {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128256}
    | {"num_attention_heads": 32, "num_key_value_heads": 8},
    "Llama-3-70B": LLAMA
    | {"hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672, "vocab_size": 128256}
    | {"num_attention_heads": 64, "num_key_value_heads": 8},
    "MPT-7B": {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50368},
    "MPT-30B": {"model_type": "mpt", "d_model": 7168, "n_heads": 64, "n_layers": 48, "vocab_size": 50368},
    "Qwen3-32B": QWEN
    | {"hidden_size": 5120, "num_hidden_layers": 64, "intermediate_size": 25600}
    | {"num_attention_heads": 64, "num_key_value_heads": 8},
    "Qwen3-30B-A3B": QWEN
    | {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "intermediate_size": 6144}
    | {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1}
    | {"num_attention_heads": 32, "num_key_value_heads": 4},
    "Qwen3-235B-A22B": QWEN
    | {"model_type": "qwen3_moe", "hidden_size": 4096, "num_hidden_layers": 94, "intermediate_size": 12288}
    | {"moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1}
    | {"num_attention_heads": 64, "num_key_value_heads": 4},
}
"""The published dimensions of the models."""
SOURCES = {
    "NeMo RL 0.5": "https://docs.nvidia.com/nemo/rl/0.5.0/about/performance-summary.html",
    "LLM Foundry": "https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md",
    "NeMo AutoModel": "https://github.com/NVIDIA-NeMo/Automodel/blob/main/docs/performance-summary.md",
    "TensorRT-LLM 0.6": "https://github.com/NVIDIA/TensorRT-LLM/blob/v0.6.1/docs/source/performance.md",
    "vLLM 0.23": "https://johnmusgrave.com/p/vllm-throughput-latency-sweep-on",
    "vLLM 0.21": "https://yobitelcomm.github.io/bench/recipes/concurrency-sweep/",
    "vLLM of 2023": "https://github.com/rkooo567/llm_benchmark",
    "gpt-fast": "https://github.com/pytorch-labs/gpt-fast",
    "Transformers": "https://github.com/h2oai/h2ogpt/blob/main/benchmarks/perf.md",
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A published time.

    Attributes:
        source: Key of `SOURCES`.
        model: Key of `MODELS`.
        gpu: Name of the GPU.
        gpus: Nodes and GPUs of a node.
        rows: Rows of a step, or rows that are sampled together.
        prompt: Tokens of a prompt; in training without sampling, of a row.
        completion: Tokens of a completion.
        longest: Tokens of the longest row, if they are not `prompt` and `completion`.
        published: Seconds, from the published figure.
        kind: `step`, `train` (with the optimizer step) or `rollout`: what was published.
        policy: Keys of the policy's section.
        generation: Keys of the engine's section.
    """

    source: str
    model: str
    gpu: str
    gpus: tuple[int, int]
    rows: int
    prompt: int
    completion: int = 0
    longest: int | None = None
    published: float
    kind: str
    policy: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)


def _training(model: str, gpu: str, tokens_per_s: float, *, rows: int, checkpointing: bool) -> Figure:
    """Rows of 2,048 tokens on 8 GPUs with FSDP, at this number of tokens per second and GPU."""
    policy = {"activation_checkpointing": checkpointing, "hf_cfg": {"data_parallel": "fsdp2"}}
    common = {"source": "LLM Foundry", "kind": "train", "gpus": (1, 8), "prompt": 2048, "policy": policy}
    return Figure(model=model, gpu=gpu, rows=rows, published=rows * 2048 / 8 / tokens_per_s, **common)


def _automodel(model: str, seconds: float, *, rows: int, options: Mapping[str, Any]) -> Figure:
    """Rows of 4,096 tokens on 8 H100."""
    common = {"source": "NeMo AutoModel", "kind": "train", "gpus": (1, 8), "prompt": 4096, "policy": {"hf_cfg": options}}
    return Figure(model=model, gpu="h100", rows=rows, published=seconds, **common)


def _sampling(
    source: str, model: str, gpu: str, seconds: float, *, rows: int, lengths: tuple[int, int], gpus: int = 1
) -> Figure:
    prompt, completion = lengths
    engine = {"backend": "vllm", "vllm_cfg": {"tensor_parallel_size": gpus, "gpu_memory_utilization": 0.95}}
    shape = {"gpus": (1, gpus), "rows": rows, "prompt": prompt, "completion": completion}
    return Figure(source=source, model=model, gpu=gpu, published=seconds, kind="rollout", generation=engine, **shape)


def _step(
    model: str,
    seconds: float,
    *,
    nodes: int,
    length: int,
    longest: int = 4096,
    rows: int,
    layout: tuple[int, int, int, int],
    tensor: int,
) -> Figure:
    """A step of GRPO with rows of up to `longest` and a mean of `length` tokens, of which 100 are assumed to be the prompt.

    `layout`: tensor, context, expert and pipeline parallelism of training; `tensor`: tensor parallelism of the engine.
    """
    names = (
        "tensor_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "pipeline_model_parallel_size",
    )
    packed = {"enabled": True, "train_mb_tokens": longest, "logprob_mb_tokens": longest}
    policy = {
        "backend": "megatron",
        "sequence_packing": packed,
        "train_global_batch_size": 512,
        "megatron_cfg": {**dict(zip(names, layout, strict=True)), "sequence_parallel": layout[0] > 1},
    }
    engine = {"backend": "vllm", "vllm_cfg": {"tensor_parallel_size": tensor}}
    shape = {"gpus": (nodes, 8), "rows": rows, "prompt": 100, "completion": length - 100, "longest": longest}
    run = {"policy": policy, "generation": engine, **shape}
    return Figure(source="NeMo RL 0.5", model=model, gpu="h100", published=seconds, kind="step", **run)


FIGURES = {
    "GRPO step, Llama-3.1-8B, 16 H100": _step(
        "Llama-3.1-8B", 92.8, nodes=2, length=1019, rows=2048, layout=(1, 1, 1, 2), tensor=1
    ),
    "GRPO step, Qwen3-32B, 32 H100": _step("Qwen3-32B", 376, nodes=4, length=3251, rows=2048, layout=(4, 1, 1, 4), tensor=4),
    "GRPO step, Qwen3-30B-A3B, 32 H100": _step(
        "Qwen3-30B-A3B", 198, nodes=4, length=3196, rows=2048, layout=(1, 1, 8, 1), tensor=2
    ),
    "GRPO step, Qwen3-235B-A22B, 128 H100": _step(
        "Qwen3-235B-A22B", 431, nodes=16, length=5700, longest=8192, rows=512, layout=(2, 2, 16, 8), tensor=16
    ),
    "training, MPT-7B, 8 A100": _training("MPT-7B", "a100", 4641, rows=96, checkpointing=False),
    "training, MPT-7B, 8 H100": _training("MPT-7B", "h100", 10643, rows=48, checkpointing=False),
    "training, MPT-30B, 8 A100, checkpointing": _training("MPT-30B", "a100", 916, rows=504, checkpointing=True),
    "training, MPT-30B, 8 H100, checkpointing": _training("MPT-30B", "h100", 2002, rows=504, checkpointing=True),
    "training, Qwen3-30B-A3B, 8 H100": _automodel("Qwen3-30B-A3B", 21.773, rows=512, options={"data_parallel": "fsdp2"}),
    "LoRA, Llama-3-70B, 8 H100": _automodel("Llama-3-70B", 26.92, rows=32, options={"lora": {"rank": 16}}),
    "sampling, Llama-2-7B, A100, 60 rows": _sampling(
        "TensorRT-LLM 0.6", "Llama-2-7B", "a100", 60 * 2048 / 1928, rows=60, lengths=(128, 2048)
    ),
    "sampling, Llama-2-7B, A100, 384 rows": _sampling(
        "TensorRT-LLM 0.6", "Llama-2-7B", "a100", 384 * 128 / 5586, rows=384, lengths=(128, 128)
    ),
    "sampling, Llama-3.1-8B, A100 40 GB, 1 row": _sampling(
        "vLLM 0.23", "Llama-3.1-8B", "a100-40gb", 128 / 75, rows=1, lengths=(1024, 128)
    ),
    "sampling, Llama-3.1-8B, H100, 1 row": _sampling(
        "vLLM 0.21", "Llama-3.1-8B", "h100", 128 * 6.48e-3, rows=1, lengths=(128, 128)
    ),
    "sampling, Llama-2-70B, 8 A100 40 GB, 32 rows": _sampling(
        "vLLM of 2023", "Llama-2-70B", "a100-40gb", 133.70, rows=32, lengths=(1, 2048), gpus=8
    ),
    "sampling, Llama-2-70B, 4 A100, 1 row": _sampling(
        "gpt-fast", "Llama-2-70B", "a100", 200 / 38.01, rows=1, lengths=(5, 200), gpus=4
    ),
    "sampling with hf, Llama-2-7B, A100, 1 row": Figure(
        source="Transformers",
        model="Llama-2-7B",
        gpu="a100",
        gpus=(1, 1),
        rows=1,
        prompt=128,
        completion=128,
        published=128 / 32.4529,
        kind="rollout",
    ),
}
"""Lengths that a source does not state are assumed: 100 tokens of a prompt (NeMo RL), 128 and 128 (vLLM 0.21, Transformers) and
200 new tokens (gpt-fast)."""


def computed(figure: Figure, folder: Path, registry: Registry) -> dict[str, float]:
    """Seconds by phase that are computed for the config of a figure.

    Args:
        figure: The figure.
        folder: Where the config of its model is written.
        registry: Used to look up backends.
    """
    (folder / "config.json").write_text(json.dumps(MODELS[figure.model]), encoding="utf-8")
    nodes, gpus = figure.gpus
    policy: dict[str, Any] = {
        "backend": "hf",
        "model_name": str(folder),
        "precision": "bfloat16",
        "max_total_sequence_length": figure.longest or figure.prompt + figure.completion,
        "shared_prefix": "off",
        **figure.policy,
    }
    if "sequence_packing" not in policy:
        policy["train_micro_batch_size"] = 1
    config: dict[str, Any] = {
        "cluster": {"backend": "ray", "num_nodes": nodes, "workers_per_node": gpus, "use_gpus": True},
        "data": {"train": {"dataset_name": "arithmetic", "num_samples": 4096}},
        "policy": policy,
    }
    if figure.kind == "train":
        config["sft"] = {"max_num_steps": 1, "global_batch_size": figure.rows, "val_period": 0}
    else:
        prompts = max(1, figure.rows // 32)
        config["grpo"] = {
            "num_prompts_per_step": prompts,
            "num_generations_per_prompt": 32,
            "max_num_steps": 1,
            "val_period": 0,
        }
        config["env"] = {"arithmetic": {}}
        policy["generation"] = {"backend": "hf", "max_new_tokens": policy["max_total_sequence_length"] - figure.prompt}
        policy["generation"] |= figure.generation
    run = load_config(config, registry=registry, stages=()).run
    if figure.kind == "rollout":
        run = resolved(run, on_gpu=True)
        assert run.policy.generation is not None
        engine = engine_time(run, registry, GPUS[figure.gpu], run.policy.generation, figure.completion)
        lengths = {"prompt": figure.prompt, "completion": figure.completion}
        return {"rollout": engine.seconds(rows=figure.rows, prompts=figure.rows, **lengths)}
    plan = plan_time(run, registry, gpu=GPUS[figure.gpu], prompt=figure.prompt, completion=figure.completion or None)
    if plan.seconds is None:
        raise RuntimeError(f"not computed: {plan.not_predicted}")
    return dict(plan.phases)


def table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """The results as Markdown, from the seconds of each figure by phase."""
    lines = ["| figure | computed | published | ratio | source |", "|---|---|---|---|---|"]
    for name, phases in rows.items():
        figure, seconds = FIGURES[name], sum(phases.values())
        ratio = f"{seconds / figure.published:.2f}"
        source = f"[{figure.source}]({SOURCES[figure.source]})"
        lines.append(f"| {name} | {seconds:.3g} s | {figure.published:.3g} s | {ratio} | {source} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compute all figures and write the results."""
    registry, rows = Registry(discover()), dict[str, dict[str, float]]()
    for name, figure in FIGURES.items():
        with TemporaryDirectory() as folder:
            rows[name] = computed(figure, Path(folder), registry)
        print(f"{name}: {sum(rows[name].values()):.3g} s, published {figure.published:.3g} s", rows[name], flush=True)
    RESULTS.with_suffix(".json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    head = (
        "# Computed and published times on GPUs\n\nCommand: `python benchmarks/plan_vs_published.py`, which uses no GPU. Its\n"
    )
    head += "docstring says what was assumed before the figures were computed, and what was corrected.\n\n"
    RESULTS.with_suffix(".md").write_text(head + table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
