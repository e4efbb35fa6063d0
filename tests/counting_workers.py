"""Runs the real step loop, synchronizer and facades over workers that only count bytes in a `memory_ledger`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from memory_ledger import GPU, Layout, Ledger, ModelBytes

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import Completion, to_output
from rl_core.errors import WeightSyncError
from rl_core.interfaces.worker import GenerationWorker, PolicyWorker, StepResult
from rl_core.weights.manifest import split_into_buckets
from rl_train.launch.train import train
from rl_train.metrics.measured import Recorder
from rl_train.weight_sync.synchronizer import WeightSynchronizer

TOKENIZER = Path(__file__).parents[1] / "examples" / "addition" / "model"
CHUNK_TOKENS = 1024
"""Default of `logprob_chunk_tokens`."""

_current: Ledger


class CountingPolicy(PolicyWorker):
    """One rank of a policy, a critic or a teacher; computes nothing."""

    def __init__(self, context: Any, config: Any) -> None:
        self._ledger, self._layout, self._config = _current, _current.layout, config
        self._owner = "critic" if config.head == "scalar" else "teacher" if config.frozen else "policy"
        precision = config.precision or "bfloat16"
        self._bytes = ModelBytes.of(self._layout, precision=precision, frozen=config.frozen)
        self._precision, self._version = precision, 0
        self._is_megatron = self._layout.policy == "megatron"

    def broadcast_weights_for_collective(self, *arguments: Any) -> Any:
        raise AssertionError("policy and engine of the ledger share a GPU, so weights go by handles")

    def setup(self) -> Mapping[str, Any]:
        self._call("setup")
        layout = self._layout
        if layout.loads_whole and layout.fsdp2:
            with self._ledger.passing(self._owner, loading=4 * layout.model.parameters):
                pass
        self._ledger.put(self._owner, on_gpu=True, weights=self._bytes.weights, masters=self._bytes.masters)
        if self._is_megatron:
            self._ledger.put(self._owner, on_gpu=True, gradients=self._bytes.gradients)
        return {"num_parameters": 1000, "device": "cuda:0", "vocab_size": 1000}

    def get_logprobs(self, data: BatchedDataDict[Any], *, reference: bool = False) -> BatchedDataDict[Any]:
        self._score("get_logprobs")
        return BatchedDataDict({"logprobs": _logprobs(data)})

    def get_topk_logprobs(self, data: BatchedDataDict[Any], *, k: int) -> BatchedDataDict[Any]:
        self._score("get_topk_logprobs")
        shape = (*data["input_ids"].shape, k)
        ids = torch.arange(k).expand(shape).clone()
        return BatchedDataDict({"topk_token_ids": ids, "topk_logprobs": torch.full(shape, -3.0)})

    def get_values(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        self._score("get_values")
        return BatchedDataDict({"values": torch.zeros(data["input_ids"].shape)})

    def train(self, data: Any, loss_fn: Any, *, counts: Any, eval_mode: bool = False, mbs: Any = None) -> list[StepResult]:
        self._call("train")
        self.prepare_for_training()
        with self._ledger.passing(self._owner, **self._activations(training=not eval_mode)):
            if not eval_mode:
                self._ledger.put(self._owner, on_gpu=True, gradients=self._bytes.gradients)
        if not eval_mode:
            self._ledger.put(self._owner, on_gpu=True, moments=self._bytes.moments)
            self._version += len(counts)
        rows = data.size // len(counts)
        return [self._loss(data.get_batch(step, rows), loss_fn, count) for step, count in enumerate(counts)]

    def _loss(self, rows: BatchedDataDict[Any], loss_fn: Any, count: Any) -> StepResult:
        """The loss of equal log-probabilities, so that the run's checks find its metrics; no step is taken, so `lr` is 0."""
        if loss_fn.candidates_key is not None:
            rows["candidate_logprobs"] = torch.full(rows[loss_fn.candidates_key].shape, -3.0)
        totals = (torch.tensor(float(number)) for number in (count.valid_seqs, count.valid_toks))
        _, metrics = loss_fn(_logprobs(rows), rows, *totals)
        return StepResult(loss=0.0, grad_norm=0.0, lr=0.0, metrics={name: float(value) for name, value in metrics.items()})

    def prepare_for_training(self) -> None:
        self._call("prepare_for_training")
        self._move(weights=True, state=True)
        if self._is_megatron:
            self._ledger.put(self._owner, on_gpu=True, gradients=self._bytes.gradients)

    def finish_training(self) -> None:
        self._call("finish_training")
        if not self._is_megatron:
            self._ledger.free(self._owner, "gradients")

    def offload_before_refit(self) -> None:
        self._call("offload_before_refit")
        self._ledger.free(self._owner, "gradients")
        self._move(weights=True, state=False)

    def offload_after_refit(self) -> None:
        self._call("offload_after_refit")
        stays = self._is_megatron and not self._layout.masters_leave
        self._ledger.free(self._owner, *(["gradients"] if self._is_megatron else []))
        self._move(weights=stays, state=False)

    def save_checkpoint(self, weights_path: Path, optimizer_path: Path | None) -> None:
        self._call("save_checkpoint")
        (weights_path / "config.json").write_text("{}")
        self._gather()
        if self._is_megatron:
            self._move(weights=True, state=True)
            layout, shard = self._layout, self._layout.model.parameters // (self._layout.tensor * self._layout.pipeline)
            # The first data-parallel rank assembles its shard of the model, for a checkpoint that any number of ranks loads.
            assembled = 12 * shard if layout.distributed_optimizer else 0
            with self._ledger.passing(self._owner, on_gpu=False, assembled=assembled):
                pass

    def load_checkpoint(self, weights_path: Path, optimizer_path: Path | None) -> None:
        self._call("load_checkpoint")

    def get_weight_version(self) -> int:
        return self._version

    def prepare_refit_info(self) -> dict[str, Any]:
        return dict(self._layout.model.manifest)

    def prepare_weights_for_ipc(self, budget_bytes: int, *, receiver_dtypes: Any = None) -> list[list[str]]:
        self._call("prepare_weights_for_ipc")
        self._buffer = budget_bytes
        # A fill of two buffers is enough: later buckets reuse them.
        return split_into_buckets(dict(self._layout.model.manifest), budget_bytes=budget_bytes)[:4]

    def get_weights_ipc_handles(self, keys: Any, *, by_reference: bool = False, file: Any = None) -> dict[str, Any]:
        self._call("get_weights_ipc_handles")
        self._require_weights()
        if by_reference:
            return {"num_bytes": 0, "weight_version": self._version, "kind": "by_reference"}
        largest = max(2 * torch.Size(self._layout.model.manifest[key][0]).numel() for key in keys)
        self._ledger.put(self._owner, on_gpu=True, buckets=2 * max(self._buffer, largest))
        self._gather()
        return {"num_bytes": 0, "weight_version": self._version}

    def finish_refit(self) -> None:
        self._ledger.free(self._owner, "buckets")

    def weight_fingerprint(self, *, dtypes: Any = None, kind: Any = None) -> str:
        self._require_weights()
        self._gather()
        return f"xxh3:{self._version}"

    def weight_digests(self, *, dtypes: Any = None, kind: Any = None) -> dict[str, str]:
        return {"all": self.weight_fingerprint()}

    def _gather(self) -> None:
        layout = self._layout
        sharded = layout.fsdp2 or layout.tensor > 1
        width = 4 if layout.fsdp2 else 2
        with self._ledger.passing(self._owner, gathered=width * layout.model.largest_tensor if sharded else 0):
            pass

    def _require_weights(self) -> None:
        if (self._owner, "weights") not in self._ledger.gpu:
            raise WeightSyncError("the weights of the policy are not on the GPU, so they cannot be sent from there")

    def _score(self, method: str) -> None:
        self._call(method)
        self._move(weights=True)
        with self._ledger.passing(self._owner, **self._activations(training=False)):
            pass

    def _activations(self, *, training: bool) -> dict[str, int]:
        layout, model = self._layout, self._layout.model
        width = 1 if self._precision == "bfloat16" else 2
        layers = model.layers // layout.pipeline if training else 0
        activations = width * layout.tokens * model.hidden * (34 + 2 * layers) // layout.tensor
        logits = CHUNK_TOKENS * model.vocab // layout.tensor * 4 * (2 if training else 1)
        gathered = 0
        if layout.fsdp2 and layout.gpus > 1:
            # The layer at work and the next one, and the unit of the embeddings and the head.
            rest = model.parameters - model.layers * model.layer
            gathered = 2 * width * (2 * model.layer + rest)
        return {"activations": activations + logits, "gathered": gathered}

    def _move(self, *, weights: bool, state: bool | None = None) -> None:
        self._ledger.put(self._owner, on_gpu=weights, weights=self._bytes.weights)
        if state is None:
            return
        if not self._is_megatron or self._layout.masters_leave:
            self._ledger.put(self._owner, on_gpu=state, masters=self._bytes.masters)
        if any((self._owner, "moments") in held for held in (self._ledger.gpu, self._ledger.host)):
            self._ledger.put(self._owner, on_gpu=state, moments=self._bytes.moments)

    def _call(self, method: str) -> None:
        self._ledger.call(self._owner, method)


class CountingEngine(GenerationWorker):
    """One process of an engine; its rows have tokens, but nothing is computed."""

    def __init__(self, context: Any, config: Any) -> None:
        self._ledger, self._layout, self._config = _current, _current.layout, config
        self._version, self._asleep = -1, set[str]()

    def setup(self) -> Mapping[str, Any]:
        self._call("setup")
        weights, layout = self._sizes()["weights"], self._layout
        if layout.engine == "vllm":
            free, share = GPU - sum(self._ledger.gpu.values()), int(layout.utilization * GPU)
            if free < share:
                raise MemoryError(f"vLLM finds {free} free bytes, but gpu_memory_utilization needs {share}")
            assert weights < share
        self._put("weights", "cache" if layout.engine == "vllm" else "weights")
        return {"max_model_len": 64, "vocab_size": 1000, "device": "cuda", "precision": "bfloat16"}

    def generate(self, data: BatchedDataDict[Any], *, greedy: bool = False) -> BatchedDataDict[Any]:
        self._call("generate")
        self.prepare_for_generation()
        if self._version < 0:
            raise WeightSyncError("The engine does not have complete weights")
        completions = [
            Completion(prompt=ids[:length], tokens=[7, 8], logprobs=[-1.0, -1.0], truncated=False, weight_version=self._version)
            for ids, length in zip(data["input_ids"].tolist(), data["input_lengths"].tolist(), strict=True)
        ]
        if self._layout.engine == "hf":
            with self._ledger.passing("engine", cache=self._layout.rows * self._layout.length * self._kv_token()):
                return to_output(completions)
        return to_output(completions)

    def poll(self) -> Any:
        raise AssertionError("runs of the ledger sample complete batches")

    def update_weights_from_collective(self) -> Any:
        raise AssertionError("policy and engine of the ledger share a GPU, so weights go by handles")

    def prepare_for_generation(self) -> None:
        self._wake("weights")
        self._wake("cache")

    def finish_generation(self) -> None:
        self._call("finish_generation")
        if self._layout.engine == "hf":
            if self._layout.engine_leaves and not self._ledger.shares_weights:
                self._sleep("weights")
            return
        level = self._config.vllm_cfg.sleep_level or 0
        if level == 0 or self._asleep:
            return
        self._ledger.free("engine", "weights", "cache")
        if level == 1:
            self._sleep("weights")
        self._asleep = {"weights", "cache"}
        if level == 2:
            self._version = -1

    def get_weight_version(self) -> int:
        self._call("get_weight_version")
        return self._version

    def invalidate_kv_cache(self) -> bool:
        self._wake("cache")
        return True

    def prepare_refit_info(self, info: Mapping[str, Any]) -> dict[str, str]:
        self._call("prepare_refit_info")
        self._wake("weights")
        return dict.fromkeys(info, "bfloat16")

    def update_weights(self, handles: Mapping[str, Any]) -> None:
        self._call("update_weights")
        self._version = handles["weight_version"]
        if handles.get("kind") == "by_reference":
            self._ledger.free("engine", "weights")
            self._ledger.shares_weights = True

    def weight_fingerprint(self) -> str:
        self._wake("weights")
        return f"xxh3:{self._version}"

    def weight_digests(self) -> dict[str, str]:
        return {"all": self.weight_fingerprint()}

    def _kv_token(self) -> int:
        return self._layout.model.kv_token_bytes

    def _sizes(self) -> dict[str, int]:
        weights = 2 * self._layout.model.parameters // self._layout.engine_tensor
        return {"weights": weights, "cache": max(0, int(self._layout.utilization * GPU) - weights)}

    def _put(self, *tags: str) -> None:
        self._ledger.put("engine", on_gpu=True, **{tag: self._sizes()[tag] for tag in dict.fromkeys(("weights", *tags))})

    def _sleep(self, *tags: str) -> None:
        self._asleep |= set(tags)
        self._ledger.put("engine", on_gpu=False, **{tag: self._sizes()[tag] for tag in tags})

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            self._ledger.put("engine", on_gpu=True, **{tag: self._sizes()[tag]})
            self._asleep.discard(tag)

    def _call(self, method: str) -> None:
        self._ledger.call("engine", method)


def _logprobs(data: BatchedDataDict[Any]) -> torch.Tensor:
    """-1 for every token but the first of each row."""
    ids = data["input_ids"]
    position = torch.arange(ids.shape[1])
    return torch.where((position > 0) & (position < data["input_lengths"].unsqueeze(1)), -1.0, 0.0)


ALGORITHMS = ("grpo", "ppo", "distillation")


def run_config(layout: Layout, algorithm: str, folder: Path, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A run of two steps with validation, and with a checkpoint after the last step."""
    model = {"backend": layout.policy, "model_name": str(TOKENIZER), "precision": "bfloat16", "max_total_sequence_length": 16}
    if layout.policy == "hf":
        model["hf_cfg"] = {"data_parallel": "fsdp2" if layout.fsdp2 else "replicate"}
    steps = {"num_prompts_per_step": 2, "max_num_steps": 2, "val_period": 1}
    config: dict[str, Any] = {
        algorithm: steps | ({"num_generations_per_prompt": 2} if algorithm == "grpo" else {}),
        "policy": {**model, "generation": {"backend": layout.engine, "max_new_tokens": 2}},
        "data": {
            "train": {"dataset_name": "arithmetic", "num_samples": 16},
            "validation": {"dataset_name": "arithmetic", "num_samples": 4, "split": "validation"},
        },
        "env": {"arithmetic": {}},
        "cluster": {"backend": "in_process"},
        "checkpointing": {"save_period": 2},
        "logger": {"log_dir": str(folder / "runs")},
    }
    if algorithm == "ppo":
        config["value"] = dict(model)
    if algorithm == "distillation":
        config["teacher"] = dict(model)
        config["loss_fn"] = {"topk": 4}
        del config["env"]
    return _merged(config, changes or {})


def record(
    layout: Layout,
    algorithm: str,
    folder: Path,
    changes: Mapping[str, Any] | None = None,
    deaths: Mapping[str, int] | None = None,
) -> Ledger:
    """The ledger of a short run.

    Args:
        layout: the layout; bytes are those of its first GPU.
        algorithm: one of `ALGORITHMS`.
        folder: temporary folder.
        changes: changes of the config.
        deaths: method to the number of its call at which the engine dies once.
    """
    ledger = Ledger(layout, deaths=dict(deaths or {}))
    path = folder / f"{algorithm}.yaml"
    path.write_text(json.dumps(run_config(layout, algorithm, folder, changes)))
    with _counting(ledger):
        train(path, console=False)
    return ledger


@contextmanager
def _counting(ledger: Ledger) -> Iterator[None]:
    """Replace the workers by counting ones, which report a GPU, and name the phases of the ledger."""
    global _current
    _current = ledger
    timed, sync = Recorder.timed, WeightSynchronizer.sync

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        outer, ledger.phase = ledger.phase, name
        ledger._observe()
        yield
        ledger.phase = "save" if outer in ("load", "save") else outer

    @contextmanager
    def named(recorder: Recorder, name: str) -> Iterator[None]:
        with phase(name), timed(recorder, name):
            yield

    def synced(synchronizer: WeightSynchronizer, **options: Any) -> dict[str, float]:
        with phase("refit"):
            return sync(synchronizer, **options)

    with ExitStack() as stack:
        for target, replacement in {
            "rl_backends_hf.policy.HFPolicyWorker": CountingPolicy,
            "rl_backends_megatron.policy.MegatronPolicyWorker": CountingPolicy,
            "rl_backends_vllm.generation.VllmGenerationWorker": CountingEngine,
            "rl_backends_hf.generation.HFGenerationWorker": CountingEngine,
            "rl_core.dispatch.worker_facade.local_device": lambda: "cuda",
            "rl_train.assembly.workers.local_device": lambda: "cuda",
            "rl_train.metrics.measured.Recorder.timed": named,
            "rl_train.weight_sync.synchronizer.WeightSynchronizer.sync": synced,
        }.items():
            stack.enter_context(mock.patch(target, replacement))
        yield


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in changes.items():
        out[key] = _merged(out[key], value) if isinstance(value, Mapping) and isinstance(out.get(key), Mapping) else value
    return out
