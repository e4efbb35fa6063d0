"""One replica of the Transformers engine: loads a model, samples from it, and receives the policy's weights.

Streamed rows (`RowsInFlight`) join while others run, are collected once each, cancelled, and held during a refit.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch

from rl_backends_base.rows import Row
from rl_backends_base.token_choice import ROW_OPTIONS
from rl_backends_hf.config import HFGenerationConfig, generation_advice
from rl_backends_hf.model import DTYPES, is_quantized, load_model
from rl_backends_hf.sampling.rows import SessionCache
from rl_backends_hf.sampling.sampler import Sampler, SamplerSettings, probe_sampling
from rl_core.backend import (
    BatchedDataDict,
    CheckpointNames,
    GenerationFacts,
    GenerationRequest,
    GenerationWorker,
    RefitManifest,
    WeightSink,
    WorkerContext,
    find_tokenizer,
    return_freed_memory,
    weights_of,
)
from rl_core.config.schema import TokenizerConfig
from rl_core.data.generation_io import to_output
from rl_core.errors import ConfigError, DataError, NotSupportedError, RLCoreError


class HFGenerationWorker(WeightSink, GenerationWorker):
    """One replica.

    Args:
        context: rank, master address and device.
        config: the section `policy.generation`.
    """

    def __init__(self, context: WorkerContext, config: HFGenerationConfig) -> None:
        self.context = context
        self._config = config
        self._model: Any = None

    def setup(self) -> GenerationFacts:
        if self._config.model_name is None:
            raise ConfigError(
                "`policy.generation.model_name` is required, because there is no policy to take it from.",
                key="policy.generation.model_name",
            )
        if not self.context.run_in_process:
            torch.set_num_threads(self.context.num_threads)
        options = self._config.hf_cfg
        dtype = DTYPES[options.precision or "float32"]
        self._model = load_model(self._config.model_name, options=options, dtype=dtype, device=self.context.device)
        self._model.requires_grad_(False)
        self._names = CheckpointNames(self._model, {name: t.shape for name, t in weights_of(self._model).items()})
        self._sampler = Sampler(
            self._model,
            settings=SamplerSettings.from_config(self._config),
            tokenizer=find_tokenizer(
                self._config.model_name, options.tokenizer or TokenizerConfig(), trust_remote_code=options.trust_remote_code
            ),
            seed=options.seed,
            rank=self.context.rank,
        )
        probe_sampling(self._sampler)
        self._rows = RowsInFlight(self._sampler, session_bytes=options.session_cache_mb * 2**20)
        return {
            "max_model_len": self._sampler.max_model_len,
            "vocab_size": self._sampler.vocab_size,
            "device": str(self._model.device),
            "reads_text": self._sampler.tokenizer is not None,
            "reads_sampling": True,
            "row_options": ROW_OPTIONS,
            "streams_tokens": True,
            "precision": options.precision or "float32",
            "num_parameters": sum(parameter.numel() for parameter in self._model.parameters()),
        }

    def tensors_by_kind(self) -> Mapping[str, Iterable[torch.Tensor]]:
        return {"weights": self._model.parameters()} if self._model is not None else {}

    def memory_advice(self, doing: str) -> str:
        return generation_advice(self._config, doing)

    def generate(self, data: BatchedDataDict[Any], *, greedy: bool = False) -> BatchedDataDict[Any]:
        self.prepare_for_generation()
        self.require_complete_weights()
        self.refuse_changed_weights()
        answer: BatchedDataDict[Any] = self._sampler.generate(data, greedy, weight_version=self.get_weight_version())
        return answer

    def batch_progress(self) -> tuple[int, int]:
        rows = self._sampler.batch
        return sum(row.has_ended for row in rows), sum(len(row.tokens) for row in rows)

    def poll(
        self, arrivals: Sequence[GenerationRequest], *, cancelled: Sequence[str] = (), wait_s: float = 0.1
    ) -> dict[str, BatchedDataDict[Any] | RLCoreError]:
        if arrivals:
            self.prepare_for_generation()
        if not cancelled:
            self.refuse_changed_weights()
        return self._rows.poll(arrivals, cancelled=cancelled, wait_s=wait_s, weight_version=self.get_weight_version())

    def close_sessions(self, sessions: Sequence[str]) -> None:
        self._rows.close_sessions(sessions)

    def prepare_for_generation(self) -> None:
        if self._can_move_weights:
            self._model.to(self.context.device)

    def finish_generation(self) -> None:
        self._sampler.batch = ()
        self._rows.release_if_idle()
        return_freed_memory()
        if self.context.device == "cuda":
            if self._can_move_weights:
                self._model.to("cpu")
            torch.cuda.empty_cache()

    @property
    def _can_move_weights(self) -> bool:
        """Whether the weights may leave the GPU: no row or policy uses them, and their devices were not chosen when loading."""
        chosen = self._config.hf_cfg.device_map is not None or is_quantized(self._model)
        return self.context.device == "cuda" and not (chosen or self._shared or len(self._rows))

    def refit_begins(self) -> None:
        self._rows.pause()

    def invalidate_kv_cache(self) -> bool:
        """Discard keys and values; rows that a refit has paused continue, unless its weights are incomplete."""
        self._rows.drop_cache()
        if not self.has_incomplete_weights:
            self._rows.resume()
        return True

    def digests_of_weights(self) -> dict[str, str]:
        self.prepare_for_generation()
        return super().digests_of_weights()

    def named_weights(self) -> Mapping[str, torch.Tensor]:
        return self._names.view_by_name(self.replaceable_weights())

    def replaceable_weights(self) -> Mapping[str, torch.Tensor]:
        return weights_of(self._model)

    def to_replaceable(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return self._names.merge(tensors)

    def prepare_refit_info(self, info: RefitManifest) -> dict[str, str]:
        if is_quantized(self._model):
            raise NotSupportedError(
                "A sampling model loaded with load_in_8bit or load_in_4bit cannot receive the policy's weights. Remove the "
                "option from `policy.generation.hf_cfg`; `precision: bfloat16` needs half the memory of float32.",
                key="policy.generation.hf_cfg",
            )
        self.prepare_for_generation()
        dtypes = super().prepare_refit_info(info)
        self._rows.pause()
        return dtypes

    def shutdown(self) -> None:
        self.leave_refit()


_PAUSED_WAIT_S: Final = 0.01
"""Maximum duration of a poll while a refit has paused the rows; the next refit call must wait for it."""
PACKED_ROWS: Final = 16
"""Number of rows that packed weights are laid out for; the number that arrives is not known."""


class RowsInFlight:
    """Rows that were submitted and not collected yet. They compute only during `poll`.

    Weights must not change between polls, except between `pause` and `resume`.

    Args:
        sampler: how to sample.
        session_bytes: memory limit of keys and values kept for sessions between their turns.
    """

    def __init__(self, sampler: Sampler, *, session_bytes: int) -> None:
        self._sampler = sampler
        self._rows: dict[str, Row] = {}
        self._sessions = SessionCache(session_bytes)
        self._loop = sampler.decode_loop(capacity=sampler.settings.max_batch_rows, sessions=self._sessions)
        self._prepared = ExitStack()
        # A generator that is still open when the interpreter exits would fail while modules are unloaded.
        weakref.finalize(self, self._prepared.close)
        self._is_prepared = self._is_paused = False

    def __len__(self) -> int:
        return len(self._rows)

    def poll(
        self, arrivals: Sequence[GenerationRequest], *, cancelled: Sequence[str], wait_s: float, weight_version: int
    ) -> dict[str, BatchedDataDict[Any] | RLCoreError]:
        """Advance the rows and return those that ended; tokens drawn now are marked with `weight_version`."""
        try:
            with self._sampler.without_gradients():
                self._loop.remove([row for name in cancelled if (row := self._rows.pop(name, None)) is not None])
                news = self._admit(arrivals)
                if not self._is_paused:
                    self._loop.weight_version = weight_version
                    return news | self._collect(self._compute(0.0 if news else wait_s)) | self._unfinished()
        except BaseException:
            self.clear()  # a step that does not finish leaves keys and values incomplete
            raise
        time.sleep(min(wait_s, _PAUSED_WAIT_S))
        return news

    def pause(self) -> None:
        """Hold all rows while the weights change, and discard everything computed from the old ones."""
        self._is_paused = True
        self.drop_cache()

    def resume(self) -> None:
        """Continue; rows keep their tokens, and their keys and values are computed again."""
        self._is_paused = False

    def drop_cache(self) -> None:
        """Discard keys, values and packed weights."""
        self._loop.recompute()
        self._release()

    def release_if_idle(self) -> None:
        """Free packed weights and sessions unless rows are in flight."""
        if not self._rows:
            self._release()

    def close_sessions(self, sessions: Sequence[str]) -> None:
        """Discard what is kept of these sessions."""
        self._sessions.close(sessions)

    def clear(self) -> None:
        """Drop all rows."""
        self.drop_cache()
        self._loop.remove(self._rows.values())
        self._rows.clear()

    def _admit(self, arrivals: Sequence[GenerationRequest]) -> dict[str, BatchedDataDict[Any] | RLCoreError]:
        """Let rows join; returns the errors of those that cannot be completed."""
        refused: dict[str, BatchedDataDict[Any] | RLCoreError] = {}
        joined: list[Row] = []
        for arrival in arrivals:
            try:
                [row] = self._sampler.read(arrival.row, greedy=arrival.greedy)
            except DataError as error:
                refused[arrival.name] = error
                continue
            row.session = arrival.row["session_ids"][0] if "session_ids" in arrival.row else None
            row.streams = "stream_tokens" in arrival.row and bool(arrival.row["stream_tokens"][0])
            self._rows[arrival.name] = row
            joined.append(row)
        self._loop.add(joined)
        return refused

    def _compute(self, wait_s: float) -> list[Row]:
        """Draw tokens until rows end, which are returned, or `wait_s` is over; at least one step."""
        until = time.monotonic() + wait_s
        ended: list[Row] = []
        while self._rows and not ended:
            if not self._is_prepared:
                steps = self._sampler.settings.max_new_tokens
                self._prepared.enter_context(self._sampler.prepared(rows=PACKED_ROWS, steps=steps))
                self._is_prepared = True
            ended = self._loop.step()
            if time.monotonic() >= until:
                break
        return ended

    def _collect(self, ended: Sequence[Row]) -> dict[str, BatchedDataDict[Any] | RLCoreError]:
        names = {id(row): name for name, row in self._rows.items()}
        results: dict[str, BatchedDataDict[Any] | RLCoreError] = {}
        for row in ended:
            name = names[id(row)]
            del self._rows[name]
            results[name] = row.error or to_output([row.so_far()])
        if ended and not self._rows:
            return_freed_memory()
        return results

    def _unfinished(self) -> dict[str, BatchedDataDict[Any] | RLCoreError]:
        """The rows that are streamed and have new tokens, with all their tokens."""
        results: dict[str, BatchedDataDict[Any] | RLCoreError] = {}
        for name, row in self._rows.items():
            if row.streams and len(row.tokens) > row.streamed:
                row.streamed = len(row.tokens)
                results[name] = BatchedDataDict({**to_output([row.so_far()]), "unfinished": torch.tensor([True])})
        return results

    def _release(self) -> None:
        self._sessions.clear()
        self._prepared.close()
        self._is_prepared = False
