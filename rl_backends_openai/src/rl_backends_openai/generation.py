"""`OpenAIGeneration`: the model of an OpenAI-compatible server as a generation engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rl_backends_openai.config import OpenAIConfig
from rl_backends_openai.server import OpenAIServer, Reply, probe
from rl_backends_openai.weight_updates import WeightUpdates, updates_of
from rl_core.backend import (
    LORA_A,
    LORA_B,
    LORA_SCALE,
    BatchedDataDict,
    Completion,
    LengthLimits,
    Prompt,
    PromptReader,
    TextGeneration,
    section_from_keywords,
    to_output,
)
from rl_core.config.schema import DeadlineConfig, TokenizerConfig
from rl_core.data.tokenizer import load_tokenizer
from rl_core.errors import ConfigError, DataError, NotSupportedError, WeightSyncError
from rl_core.event_loop import EventLoopThread
from rl_core.http import HttpError
from rl_core.interfaces.generation import GenerationDatumSpec, GenerationInterface, GenerationOutputSpec

if TYPE_CHECKING:
    from rl_core.cluster.virtual_cluster import RayVirtualCluster

_log = logging.getLogger(__name__)
_NO_VERSION = -1
_ANY_ID = 2**31 - 1
_UNLIMITED = 2**31 - 1
ResultT = TypeVar("ResultT")


class OpenAIGeneration(TextGeneration, GenerationInterface):
    """Samples with the model of a server; one request per row.

    On creation it checks that the server has the model and, with `weight_updates`, that it returns token ids and
    log-probabilities of the sampling distribution.

    A row whose request fails after all retries is returned with a reason in `failures`; a request that the server rejects
    raises HttpError. With `weight_updates`, every row must be sampled by the weights of the last sync. Requests are sent from
    this process, so no cluster is needed.

    Args:
        config: the section `policy.generation`, or a mapping of its fields and those of `openai_cfg`.
        cluster: not used.
        deadlines: timeouts of weight updates.

    Raises:
        ConfigError: a field has a value that is not allowed, or the server lacks what the config requires.
        HttpError: the server is not reachable.
    """

    def __init__(
        self,
        config: OpenAIConfig | Mapping[str, Any] | None = None,
        *,
        cluster: RayVirtualCluster | None = None,
        deadlines: DeadlineConfig | None = None,
    ) -> None:
        self.config: OpenAIConfig = (
            config
            if isinstance(config, OpenAIConfig)
            else section_from_keywords("OpenAIGeneration", OpenAIConfig, own="openai_cfg", fields=config or {})
        )
        self._server = OpenAIServer(self.config)
        self._updates = updates_of(self.config, deadline_s=(deadlines or DeadlineConfig()).refit_s)
        self._loop: EventLoopThread | None = EventLoopThread("rlcore-openai")
        try:
            server = self._loop.run(probe(self._server, self.config))
        except BaseException:
            self.shutdown()
            raise
        own = self.config.openai_cfg
        self._max_model_len = min(own.max_model_len or _UNLIMITED, server.max_model_len or _UNLIMITED)
        self.facts: dict[str, Any] = {
            "device": own.base_url,
            "max_model_len": self._max_model_len,
            "images": server.reads_images and self.config.image_api_problem is None,
        }
        """What is known about the engine; with `weight_updates` also its `precision`."""
        self._reader = PromptReader(
            LengthLimits(vocab_size=_ANY_ID, max_model_len=self._max_model_len, max_new_tokens=self.config.max_new_tokens),
            stop_strings=self.config.stop_strings or (),
            reads_images=True,
        )
        self._synced_version: int | None = None
        self._batch: list[Completion | HttpError] = []
        """The rows of the latest call of `generate` that have ended."""

    @property
    def tokenizer_section(self) -> TokenizerConfig:
        return self.config.openai_cfg.tokenizer or TokenizerConfig()

    @property
    def reads_messages(self) -> bool:
        return self.config.openai_cfg.api == "chat"

    @property
    def has_own_weights(self) -> bool:
        return self.config.has_own_weights

    @property
    def weight_version(self) -> int:
        return _NO_VERSION if self._updates is None else self._run(self._updates.version())

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete every row of `data` with a request each, see `GenerationInterface`.

        Raises:
            HttpError: the server rejected a row, or no row could be sampled.
            WeightSyncError: the server's weights are not those of the last sync.
        """
        if (output := self._generate_messages(data, greedy)) is not None:
            return output
        rows, loop = self._rows(data), self._started()
        outcomes = loop.run(self._sample_all(rows, greedy))
        failed = [outcome for outcome in outcomes if isinstance(outcome, HttpError)]
        if failed and len(failed) == len(outcomes):
            raise failed[0]
        return _output(rows, outcomes)

    def batch_progress(self) -> tuple[int, int] | None:
        done = list(self._batch)
        return len(done), sum(len(row.tokens) for row in done if isinstance(row, Completion))

    async def generate_async(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> AsyncIterator[tuple[int, BatchedDataDict[GenerationOutputSpec]]]:
        """Yield each row when it ends; one whose request fails after all retries has its reason in `failures`."""
        rows = self._rows(data)
        running = {asyncio.wrap_future(self._started().start(self._sample(*row, greedy=greedy))): row for row in rows}
        try:
            while running:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    row = running.pop(future)
                    yield row[0].number, _output([row], [future.result()])
        finally:
            for future in running:
                future.cancel()

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        self._batch = []
        return True

    def shutdown(self) -> bool:
        if self._loop is not None:
            self._loop.run(self._close())
            self._loop.close()
            self._loop = None
        return True

    def prepare_refit_info(self, info: Mapping[str, Any]) -> dict[str, str]:
        dtypes = self._run(self._receiving("prepare_refit_info").prepare(info))
        of_base = {name: dtype for name, dtype in dtypes.items() if not name.endswith((LORA_A, LORA_B, LORA_SCALE))}
        floats = {dtype for dtype in of_base.values() if "float" in dtype}
        self.facts["precision"] = floats.pop() if len(floats) == 1 else "mixed"
        return dtypes

    def update_weights(self, ipc_handles: Mapping[str, Any]) -> None:
        self._run(self._receiving("update_weights").update(ipc_handles))

    def weight_fingerprint(self) -> str:
        return self._run(self._receiving("weight_fingerprint").digests())[0]

    def weight_digests(self) -> dict[str, str]:
        return self._run(self._receiving("weight_digests").digests())[1]

    def invalidate_kv_cache(self) -> bool:
        """Empty the server's cache and resume sampling, which was paused for the weight update; True if the cache is empty."""
        updates = self._receiving("invalidate_kv_cache")
        is_empty = self._run(updates.resume())
        self._synced_version = self._run(updates.version())
        return is_empty

    def _rows(self, data: BatchedDataDict[Any]) -> list[_Row]:
        prompts = self._reader.read(data)
        if any(prompt.images for prompt in prompts) and not self.facts["images"]:
            reason = self.config.image_api_problem or (
                f"{self._server.name} does not report that {self.config.openai_cfg.model} reads images in prompts of token "
                "ids. `rlcore serve` of a vision-language model does"
            )
            raise NotSupportedError(f"Rows have images, which the generation backend `openai` cannot send: {reason}.")
        if not self.reads_messages:
            return [(prompt, None) for prompt in prompts]
        if "messages" not in data:
            raise DataError(
                "policy.generation.openai_cfg.api is chat, which needs `messages` for each row, but the batch has only token "
                "ids. Set api: completions, or sample through rollouts."
            )
        return list(zip(prompts, data["messages"], strict=True))

    async def _sample_all(self, rows: Sequence[_Row], greedy: bool) -> list[Completion | HttpError]:
        self._batch = ended = []

        async def sample(row: _Row) -> Completion | HttpError:
            outcome = await self._sample(*row, greedy=greedy)
            ended.append(outcome)
            return outcome

        tasks = [asyncio.ensure_future(sample(row)) for row in rows]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample(
        self, prompt: Prompt, messages: Sequence[Mapping[str, Any]] | None, *, greedy: bool
    ) -> Completion | HttpError:
        """The completion of a row, or the temporary error because of which there is none."""
        try:
            reply = await self._server.sample(prompt, messages, greedy=greedy)
        except HttpError as error:
            if not error.is_temporary:
                raise
            _log.warning("a row could not be sampled: %s", error)
            return error
        tokens = reply.token_ids if reply.token_ids is not None else self._tokens_of(reply)
        logprobs = reply.logprobs or []
        return Completion(
            prompt=prompt.tokens,
            tokens=tokens,
            logprobs=logprobs if len(logprobs) == len(tokens) else [0.0] * len(tokens),
            truncated=reply.truncated,
            weight_version=await self._version_of(reply),
        )

    def _tokens_of(self, reply: Reply) -> list[int]:
        """The text as tokens, with an end-of-sequence token if a stop ended it."""
        if self._tokenizer is None:
            name = self.tokenizer_section.name or self.config.model_name
            if name is None:
                raise ConfigError(
                    "policy.generation.model_name is required. The server returns text, which is tokenized with this model's "
                    "tokenizer."
                )
            self._tokenizer = load_tokenizer(name, model_name=self.config.model_name)
        ids: list[int] = self._tokenizer(reply.text or "", add_special_tokens=False)["input_ids"]
        return ids if reply.truncated else [*ids, self._tokenizer.eos_token_id]

    async def _version_of(self, reply: Reply) -> int:
        """The version of the weights that sampled a row.

        Raises:
            WeightSyncError: they are not those of the last sync.
        """
        if self._updates is None:
            return _NO_VERSION
        version = reply.weight_version if reply.weight_version is not None else await self._updates.version()
        if self._synced_version is not None and version != self._synced_version:
            raise WeightSyncError(
                f"The server {self._server.name} sampled with weight version {version}, but the last sync sent version "
                f"{self._synced_version}: it was restarted, or another run updates its weights."
            )
        return version

    def _receiving(self, verb: str) -> WeightUpdates:
        if self._updates is None:
            raise NotSupportedError(
                f"OpenAIGeneration does not support `{verb}`, because the server keeps its own weights. To train with it, set "
                "policy.generation.openai_cfg.weight_updates."
            )
        return self._updates

    def _started(self) -> EventLoopThread:
        if self._loop is None:
            raise NotSupportedError("The engine was shut down.")
        return self._loop

    def _run(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        return self._started().run(coroutine)

    async def _close(self) -> None:
        await self._server.close()
        if self._updates is not None:
            await self._updates.close()


_Row = tuple[Prompt, Sequence[Mapping[str, Any]] | None]


def _output(rows: Sequence[_Row], outcomes: Sequence[Completion | HttpError]) -> BatchedDataDict[Any]:
    completions = [
        outcome
        if isinstance(outcome, Completion)
        else Completion(prompt=prompt.tokens, tokens=[], logprobs=[], truncated=False, weight_version=_NO_VERSION)
        for (prompt, _), outcome in zip(rows, outcomes, strict=True)
    ]
    output = to_output(completions)
    if any(isinstance(outcome, HttpError) for outcome in outcomes):
        output["failures"] = [str(outcome) if isinstance(outcome, HttpError) else None for outcome in outcomes]
    return output
