"""One vLLM replica as a generation worker: starts the engine, samples, streams, and forwards refits to it.

`VllmGenerationWorker("path/to/model", ...)` needs no worker group: it makes its own context and config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rl_backends_vllm.config import VllmConfig
from rl_backends_vllm.device import (
    can_sleep,
    engine_arguments,
    greedy_processor,
    matmul_precision,
    quiet_import,
    set_process_environment,
)
from rl_backends_vllm.engine import Engine
from rl_backends_vllm.inflight import InFlightRequests
from rl_backends_vllm.model_folder import ModelFiles, model_files
from rl_backends_vllm.requests import SamplingSettings
from rl_backends_vllm.shm_cleanup import remove_replica_folder, remove_stale_folders, replica_folder, unlink_openmp_page
from rl_core.backend import (
    NO_VERSION,
    BatchedDataDict,
    GenerationFacts,
    GenerationRequest,
    GenerationWorker,
    LengthLimits,
    Prompt,
    PromptReader,
    WorkerContext,
    check_files,
    end_token_ids,
    return_freed_memory,
    same_digests_on_every_replica,
    to_output,
)
from rl_core.config.validator import section_from_keywords
from rl_core.errors import ConfigError, DataError, EngineDiedError, RLCoreError, WeightSyncError, with_key
from rl_core.interfaces.policy import RefitManifest

_STEP_S = 0.01
_TOO_LITTLE_MEMORY = ("No available memory", "available KV cache memory", "Free memory on device")
"""In the errors of an engine that does not start because it has no memory for its KV cache."""
_INCOMPLETE_WEIGHTS = (
    "The engine does not have complete weights: its first or current refit has not finished. Refit it, then sample."
)


class VllmGenerationWorker(GenerationWorker):
    """One replica; vLLM itself starts tensor and pipeline parallel processes.

    `VllmGenerationWorker("path/to/model", max_new_tokens=64)` is a replica in this process, which starts its engine at the
    first call of `generate` or `update_weights`.

    Args:
        context: index of the replica, device, and number of threads; or the name or folder of a model.
        config: the section `policy.generation`, instead of a model and fields.
        model_name: name or folder of the model.
        **fields: any field of `VllmConfig` or of its `vllm_cfg`.

    Raises:
        ConfigError: a field does not exist or has a value that is not allowed, two models are given, or a model or fields are
            given in addition to `config`.
    """

    def __init__(
        self,
        context: WorkerContext | str | None = None,
        config: VllmConfig | None = None,
        *,
        model_name: str | None = None,
        **fields: Any,
    ) -> None:
        self._starts_itself = not isinstance(context, WorkerContext)
        self.context = context if isinstance(context, WorkerContext) else standalone_context()
        models = [name for name in (context, model_name) if isinstance(name, str)]
        self._config = standalone_config(models, fields) if config is None else only_config(config, models, fields)
        self._engine: Engine | None = None
        self._calls = 0
        self._weight_version = NO_VERSION
        self._asleep: set[str] = set()
        self._checked_weights = False

    def setup(self) -> GenerationFacts:
        config = self._config
        if config.model_name is None:
            raise ConfigError(
                "`policy.generation.model_name` is required, because there is no policy to take it from.",
                key="policy.generation.model_name",
            )
        if self.context.run_in_process:
            set_process_environment(self.context.device)
        quiet_import()
        vllm_cfg = config.vllm_cfg
        tokenizer_name = vllm_cfg.tokenizer.name if vllm_cfg.tokenizer is not None else None
        remove_stale_folders()
        with (
            replica_folder() as folder,
            model_files(
                config.model_name, tokenizer_name=tokenizer_name, trust_remote_code=vllm_cfg.trust_remote_code, temp_dir=folder
            ) as files,
        ):
            load_format = vllm_cfg.load_format or ("auto" if files.has_weights else "dummy")
            if load_format != "dummy":
                # vLLM itself leaves matrices that are missing uninitialized, and ignores biases that the config lacks.
                # Fields that the class lacks, and those of positions, decide no tensors.
                overrides = dict(config.vllm_kwargs.get("hf_overrides") or {})
                fields = {key for key in overrides if hasattr(files.hf_config, key) and not key.startswith("rope_")}
                with with_key("policy.generation.model_name"):
                    check_files(config.model_name, **{key: overrides[key] for key in fields})
            self._sampling = self._settings(files)
            self._engine = _start(self._arguments(files, load_format), asynchronous=vllm_cfg.async_engine)
        return_freed_memory()
        self._requests = InFlightRequests(self._engine)
        self._engine.set_weight_version(self._weight_version)
        self._engine.rpc("rlcore_init_receiver", self.context.rank, self.context.device)
        unlink_openmp_page()
        self._has_weights = load_format != "dummy"
        model = self._engine.config.model_config
        reads_images = config.reads_images(files.hf_config)
        row_options = ["top_logprobs", "prompt_logprobs", "stop_token_ids"]
        row_options += ["json_schema"] if files.tokenizer_path is not None else []
        self._reader = PromptReader(
            LengthLimits(
                vocab_size=model.get_vocab_size(), max_model_len=model.max_model_len, max_new_tokens=config.max_new_tokens
            ),
            stop_strings=config.stop_strings or (),
            reads_text=files.tokenizer_path is not None,
            row_options=row_options,
            reads_images=reads_images,
            seed=vllm_cfg.seed,
            rank=self.context.rank,
        )
        return {
            "max_model_len": model.max_model_len,
            "vocab_size": model.get_vocab_size(),
            "device": self.context.device,
            "precision": matmul_precision(str(model.dtype).removeprefix("torch."), device=self.context.device),
            "reads_text": files.tokenizer_path is not None,
            "row_options": row_options,
            "streams_tokens": True,
            "images": reads_images,
        }

    def memory_advice(self, doing: str) -> str:
        vllm_cfg, section = self._config.vllm_cfg, "policy.generation.vllm_cfg"
        length = f"lower `{section}.max_model_len`" + (f" from {vllm_cfg.max_model_len}" if vllm_cfg.max_model_len else "")
        if self.context.device == "cpu":
            size = f"`{section}.kv_cache_gib`" + (f" ({vllm_cfg.kv_cache_gib:g})" if vllm_cfg.kv_cache_gib else "")
            return f"Raise {size} if the KV cache is too small, lower it if memory is full, or {length}."
        return (
            f"Raise `{section}.gpu_memory_utilization` ({vllm_cfg.gpu_memory_utilization:g}) if the KV cache is too small; "
            f"lower it if other processes need the memory; or {length}, or set `{section}.tensor_parallel_size: "
            f"{2 * vllm_cfg.tensor_parallel_size}`."
        )

    def generate(
        self, data: BatchedDataDict[Any] | torch.Tensor | None = None, *, greedy: bool = False, **columns: Any
    ) -> BatchedDataDict[Any]:
        """Sample a batch of rows; also takes `input_ids` [B, T] and further columns as arguments."""
        data = as_batch(data, columns)
        if self._starts_itself and self._engine is None:
            self.setup()
        # A sleeping engine would never process a row.
        self.prepare_for_generation()
        self._check_weights()
        prompts = self._reader.read(data)
        self._calls += 1
        rows = {
            f"{self._calls}-{prompt.number}": (prompt, self._sampling.parameters(prompt, greedy=greedy)) for prompt in prompts
        }
        return to_output(self._requests.complete(rows), has_options="sampling" in data)

    def batch_progress(self) -> tuple[int, int]:
        return self._requests.batch_progress()

    def poll(
        self, arrivals: Sequence[GenerationRequest], *, cancelled: Sequence[str] = (), wait_s: float = 0.1
    ) -> dict[str, BatchedDataDict[Any] | RLCoreError]:
        if self.context.run_in_process and self._config.vllm_cfg.async_engine:
            wait_s = max(wait_s, _STEP_S)  # its steps run elsewhere, so a poll of 0 s would not wait for one
        self._requests.cancel(cancelled)
        results: dict[str, BatchedDataDict[Any] | RLCoreError] = {}
        for arrival in arrivals:
            try:
                self._start_request(arrival)
            except DataError as error:
                results[arrival.name] = error
        for name, row in self._requests.collect(0.0 if results else wait_s).items():
            results[name] = row if isinstance(row, RLCoreError) else to_output([row])
        for name, so_far in self._requests.unfinished(self._weight_version).items():
            results[name] = BatchedDataDict({**to_output([so_far]), "unfinished": torch.tensor([True])})
        return results

    def check_processes(self) -> None:
        engine = self._engine
        if engine is not None and engine.is_dead():
            raise EngineDiedError("A process of the vLLM engine exited.")

    def prepare_for_generation(self) -> None:
        for tag in ("weights", "kv_cache"):
            self._wake(tag)

    def finish_generation(self) -> None:
        level = self._config.vllm_cfg.sleep_level or 0
        if level == 0 or self._asleep or not can_sleep(self.context.device):
            return
        self._running.sleep(level)
        self._asleep = {"weights", "kv_cache"}
        if level == 2:
            self._weight_version, self._has_weights = NO_VERSION, False

    def get_weight_version(self) -> int:
        return self._weight_version

    def invalidate_kv_cache(self) -> bool:
        self._wake("kv_cache")
        emptied = self._running.reset_prefix_cache()
        if emptied and self._running.is_paused:
            self._resume()
        return emptied

    def prepare_refit_info(self, info: Mapping[str, Any]) -> dict[str, str]:
        """Begin a refit and return the dtypes to send; requests in progress wait until the cache has been emptied."""
        self._wake("weights")
        self._checked_weights = False
        ran_before = not self._running.is_paused
        self._running.pause()
        try:
            dtypes: dict[str, str] = self._running.refit("prepare_refit_info", dict(info))[0]
        except WeightSyncError:
            if ran_before:  # nothing was loaded, so the weights are unchanged
                self._resume()
            raise
        return dtypes

    def update_weights(self, weights_handle: Mapping[str, Any]) -> None:
        """Load one bucket of weights in every process of this replica.

        Without a group, the first bucket begins a refit of all weights, and the replica samples again once it has them all.
        """
        if self._starts_itself:
            self._begin_own_refit(weights_handle)
        self._weight_version, self._checked_weights = NO_VERSION, False
        self._running.refit("update_weights", weights_handle)
        self._update_version()
        if self._starts_itself and self._weight_version != NO_VERSION:
            self.invalidate_kv_cache()

    def init_collective(self, ip: str, port: int, world_size: int, left_out: int = 0, *, timeout_s: float = 600.0) -> None:
        """Join the weight collective with every process of this replica."""
        self._running.refit("init_collective", ip, port, world_size, left_out, timeout_s=timeout_s)

    def update_weights_from_collective(self) -> None:
        """Receive and load all weights of one refit from the collective, in every process of this replica."""
        self._weight_version, self._checked_weights = NO_VERSION, False
        self._running.refit("update_weights_from_collective")
        self._update_version()

    def weight_digests(self) -> dict[str, str]:
        """Name to the digest of each received weight, which must be equal in all processes of this replica."""
        self._wake("weights")
        return same_digests_on_every_replica(self._running.refit("weight_digests"))

    def weight_fingerprint(self) -> str:
        """The combined digest of the received weights; WeightSyncError names the tensors that differ between processes."""
        self._wake("weights")
        fingerprints: list[str] = self._running.refit("weight_fingerprint")
        if len(set(fingerprints)) > 1:
            self.weight_digests()  # names the tensors
        return fingerprints[0]

    def shutdown(self) -> None:
        engine, self._engine, self._starts_itself = self._engine, None, False
        if engine is None:
            return
        try:
            if not engine.is_dead():
                self._requests.clear()
                engine.refit("leave_refit")
        finally:
            engine.shutdown()
            remove_replica_folder()

    @property
    def _running(self) -> Engine:
        if self._engine is None:
            raise WeightSyncError("The engine is not running: setup was not called, or it was shut down.")
        return self._engine

    def _arguments(self, files: ModelFiles, load_format: str) -> dict[str, Any]:
        from rl_backends_vllm.executors import MultiProcessExecutor, SingleProcessExecutor

        vllm_cfg = self._config.vllm_cfg
        arguments: dict[str, Any] = {
            "model": files.path,
            "revision": files.revision,
            "tokenizer": files.tokenizer_path,
            "tokenizer_revision": files.revision if files.tokenizer_path == files.path else None,
            "skip_tokenizer_init": files.tokenizer_path is None,
            # By default, vLLM would run a float32 model in lower precision.
            "dtype": vllm_cfg.precision or str(getattr(files.hf_config, "dtype", None) or "auto").removeprefix("torch."),
            "load_format": load_format,
            "trust_remote_code": vllm_cfg.trust_remote_code,
            "max_model_len": vllm_cfg.max_model_len,
            "max_num_batched_tokens": vllm_cfg.max_num_batched_tokens,
            "enable_prefix_caching": vllm_cfg.enable_prefix_caching,
            "kv_cache_dtype": vllm_cfg.kv_cache_dtype,
            "tensor_parallel_size": vllm_cfg.tensor_parallel_size,
            "pipeline_parallel_size": vllm_cfg.pipeline_parallel_size,
            "distributed_executor_backend": MultiProcessExecutor if vllm_cfg.processes > 1 else SingleProcessExecutor,
            "seed": vllm_cfg.seed,
            "logprobs_mode": "processed_logprobs",
            # It refuses each JSON schema that it cannot enforce; xgrammar 0.2.8, the default, ignores some keywords.
            "structured_outputs_config": {"backend": "guidance"},
            "logits_processors": [greedy_processor(self.context.device)] if self._config.temperature != 1.0 else None,
            "worker_extension_cls": "rl_backends_vllm.refit.RefitExtension",
            "disable_log_stats": True,
            # The run draws its own progress bars.
            "use_tqdm_on_load": False,
        }
        arguments |= engine_arguments(vllm_cfg, device=self.context.device, hf_config=files.hf_config)
        if self._config.reads_images(files.hf_config):
            # Rows have the tensors of their pictures; see `rl_backends_vllm.pictures`.
            arguments |= {"model_impl": "transformers", "skip_mm_profiling": True, "mm_processor_cache_gb": 0}
        if vllm_cfg.max_lora_rank is not None:
            from rl_backends_vllm.lora import lora_arguments

            arguments |= lora_arguments(
                vllm_cfg, device=self.context.device, dtype=arguments["dtype"], hf_config=files.hf_config
            )
        return arguments | self._config.vllm_kwargs

    def _settings(self, files: ModelFiles) -> SamplingSettings:
        config = self._config
        if config.stop_strings and files.tokenizer_path is None:
            raise ConfigError(
                f"policy.generation.stop_strings is {config.stop_strings}, which requires a tokenizer that "
                f"Transformers can load, but {config.model_name!r} has none. Set policy.tokenizer.name."
            )
        return SamplingSettings(
            config=config,
            end_ids=end_token_ids(
                files.generation_config,
                files.hf_config,
                files.tokenizer,
                further=config.stop_token_ids,
                repeated=config.eos_token_id,
            ),
        )

    def _begin_own_refit(self, weights_handle: Mapping[str, Any]) -> None:
        if self._engine is None:
            self.setup()
        if not self._running.is_paused:
            self.prepare_refit_info(as_sent(self._running.refit("expected_weights")[0], weights_handle))

    def _start_request(self, arrival: GenerationRequest) -> None:
        if not self._running.is_paused:
            self.prepare_for_generation()
            self._check_weights()
        [prompt] = self._reader.read(arrival.row)
        streams = "stream_tokens" in arrival.row and bool(arrival.row["stream_tokens"][0])
        self._add(arrival.name, prompt, greedy=arrival.greedy, streams=streams)

    def _add(self, name: str, prompt: Prompt, *, greedy: bool, streams: bool = False) -> None:
        parameters = self._sampling.parameters(prompt, greedy=greedy, streams=streams)
        self._requests.add(name, prompt, parameters)

    def _resume(self) -> None:
        # After the cache was emptied, so that no token of the old weights is still on its way.
        self._running.set_weight_version(self._weight_version)
        self._running.resume()

    def _update_version(self) -> None:
        versions = set(self._running.refit("get_weight_version"))
        if len(versions) == 1:
            self._weight_version = versions.pop()
            self._has_weights = self._has_weights or self._weight_version != NO_VERSION

    def _check_weights(self) -> None:
        if not self._checked_weights:
            # A call to every process of the replica, so not for every row. Only a refit changes the answer.
            self._running.refit("require_complete_weights")
            self._checked_weights = True
        if not self._has_weights or self._running.is_paused:
            raise WeightSyncError(_INCOMPLETE_WEIGHTS)

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            self._running.wake(tag)
            self._asleep.discard(tag)


def _start(arguments: Mapping[str, Any], *, asynchronous: bool) -> Engine:
    from rl_backends_vllm.async_engine import AsyncEngine
    from rl_backends_vllm.engine import InProcessEngine

    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        return AsyncEngine(given) if asynchronous else InProcessEngine(given)
    except ValueError as error:  # raised by vLLM's config classes
        if any(text in str(error) for text in _TOO_LITTLE_MEMORY):
            raise MemoryError(str(error)) from error
        raise ConfigError(f"vLLM does not start with policy.generation.vllm_cfg and vllm_kwargs: {error}") from error


def standalone_context() -> WorkerContext:
    """The context of a single worker in this process, on the GPU if there is one."""
    return WorkerContext(
        rank=0,
        world_size=1,
        local_rank=0,
        node_rank=0,
        master_address="127.0.0.1",
        master_port=0,
        device="cuda" if torch.cuda.is_available() else "cpu",
        run_in_process=True,
    )


def standalone_config(models: Sequence[str], fields: Mapping[str, Any]) -> VllmConfig:
    """The section `policy.generation` of keyword arguments, which may also be fields of `vllm_cfg`.

    Raises:
        ConfigError: There is no model or more than one, a field does not exist, or a value is not allowed.
    """
    if len(models) > 1:
        raise ConfigError(f"VllmGenerationWorker has two models: {models[0]!r} and model_name={models[1]!r}. Give only one.")
    model_name = models[0] if models else None
    return section_from_keywords("VllmGenerationWorker", VllmConfig, own="vllm_cfg", fields=fields, model_name=model_name)


def only_config(config: VllmConfig, models: Sequence[str], fields: Mapping[str, Any]) -> VllmConfig:
    """`config` itself.

    Raises:
        ConfigError: A model or fields are given as well, which would have no effect.
    """
    unused = [*([f"the model {models[0]!r}"] if models else []), *sorted(fields)]
    if unused:
        raise ConfigError(
            f"VllmGenerationWorker has `config`, so {', '.join(unused)} would have no effect. Set it in `config`, or leave "
            "`config` out."
        )
    return config


def as_sent(expected: RefitManifest, weights_handle: Mapping[str, Any]) -> RefitManifest:
    """The manifest of a refit, of which the first bucket is known.

    Args:
        expected: Name to (shape, dtype) of the engine's weights.
        weights_handle: The bucket; other weights are converted from the engine's data types in the same way.
    """
    placements = weights_handle.get("placements", {})
    sent = {expected[name][1]: placement.dtype for name, placement in placements.items() if name in expected}
    return {name: (shape, sent.get(dtype, dtype)) for name, (shape, dtype) in expected.items()}


def as_batch(data: BatchedDataDict[Any] | torch.Tensor | None, columns: Mapping[str, Any]) -> BatchedDataDict[Any]:
    """A batch of prompts; token ids [B, T] become one, without padding unless an `attention_mask` is given.

    Args:
        data: The batch, or its `input_ids`, which may also be a column.
        columns: Further columns of token ids, such as `attention_mask` or `max_new_tokens`.

    Raises:
        DataError: A batch and further columns were given, or the token ids are not [B, T].
    """
    if data is None:
        if "input_ids" not in columns:
            raise DataError("generate takes a batch or input_ids [B, T], and has neither.")
        columns = dict(columns)
        data = columns.pop("input_ids")
    if not isinstance(data, torch.Tensor):
        if columns:
            raise DataError(f"{', '.join(sorted(columns))} must be columns of the batch, not arguments of generate.")
        return data
    if data.dim() != 2:
        raise DataError(f"input_ids has shape {list(data.shape)}: expected [B, T].")
    lengths = {} if {"attention_mask", "input_lengths"} & columns.keys() else {"attention_mask": torch.ones_like(data)}
    return BatchedDataDict({"input_ids": data, **lengths, **columns})
