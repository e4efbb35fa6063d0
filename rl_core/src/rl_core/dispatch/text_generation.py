"""Text for engines: prompts are tokenized, and completions decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rl_core.config.schema import TokenizerConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.schema import pad_value
from rl_core.data.shared_prefix import cat_right_padded
from rl_core.data.tokenizer import conversation_tokens, decode, find_tokenizer, load_tokenizer
from rl_core.errors import RLCoreError
from rl_core.interfaces.generation import GenerationDatumSpec, GenerationOutputSpec
from rl_core.interfaces.private_names import PrivateNames

Conversation = Sequence[Mapping[str, Any]]
"""Messages of `role` and `content`."""
_ENGINE_COLUMNS = frozenset(GenerationDatumSpec.__annotations__)


class TextGeneration(PrivateNames):
    """Adds `generate_text` to a class with `generate` and a `config` with `model_name`."""

    config: Any
    _tokenizer: Any = None

    @property
    def tokenizer_section(self) -> TokenizerConfig:
        """Tokenizer for prompts and completions: `tokenizer` of the section, or the model's own."""
        return getattr(self.config, "tokenizer", None) or TokenizerConfig()

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Sample a batch of rows; the engine implements it, see `GenerationInterface`."""
        raise NotImplementedError

    def generate_text(self, prompts: str | Sequence[str | Conversation], *, greedy: bool = False) -> list[str]:
        """The completion of each prompt as text, without special tokens.

        A string is sent as one user message. Messages are rendered by the tokenizer's chat template; without a template their
        contents are concatenated. Returns one text per prompt, in order, and a list of one for a single string;
        `greedy` takes the most likely tokens.

        Raises:
            DataError: the model has no tokenizer, or its chat template cannot render the messages.
            RLCoreError: the engine could not sample a prompt, such as after timeouts of a server.
        """
        rows = [prompts] if isinstance(prompts, str) else prompts
        if not rows:
            return []
        output = self.generate(self._tokenized(rows), greedy=greedy)
        if failed := [(row, reason) for row, reason in enumerate(output.get("failures") or ()) if reason is not None]:
            raise RLCoreError(
                f"{len(failed)} of {len(rows)} prompts could not be sampled. prompts[{failed[0][0]}]: {failed[0][1]}. Call "
                "generate to keep the other rows; it returns the reasons in `failures`."
            )
        return self._completions(output)

    def _generate_messages(self, data: Any, greedy: bool) -> BatchedDataDict[GenerationOutputSpec] | None:
        """The output for rows of text, or with columns that no engine reads, see `GenerationOutputSpec.messages`; else None."""
        if not isinstance(data, Mapping):
            return None
        carried = {key: data[key] for key in data if key not in _ENGINE_COLUMNS}
        prompts = _conversations(data)
        if not carried and ("input_ids" in data or prompts is None):
            return None
        rows = {key: data[key] for key in data if key in _ENGINE_COLUMNS and key != "messages"}
        if prompts is not None:
            rows = {**self._tokenized(prompts), **rows}
        output = self.generate(BatchedDataDict(rows), greedy=greedy)
        if prompts is not None:
            answers = [{"role": "assistant", "content": text} for text in self._completions(output)]
            carried["messages"] = [[*log, answer] for log, answer in zip(prompts, answers, strict=True)]
        return BatchedDataDict({**carried, **output})

    def _tokenized(self, prompts: Sequence[str | Conversation]) -> BatchedDataDict[Any]:
        if self._tokenizer is None:
            # Loading the tokenizer of a folder that has none raises an error that says so.
            name = self.config.model_name
            self._tokenizer = find_tokenizer(name, self.tokenizer_section) or load_tokenizer(name)
        ids = [conversation_tokens(_as_messages(each), self._tokenizer, add_generation_prompt=True) for each in prompts]
        rows = [torch.tensor(row, dtype=torch.int64) for row in ids]
        return BatchedDataDict(
            {
                "input_ids": cat_right_padded([row.unsqueeze(0) for row in rows], pad_value=pad_value("input_ids")),
                "input_lengths": torch.tensor([len(row) for row in rows]),
            }
        )

    def _completions(self, output: BatchedDataDict[GenerationOutputSpec]) -> list[str]:
        ends, sampled = output["unpadded_sequence_lengths"].tolist(), output["generation_lengths"].tolist()
        return [
            decode(self._tokenizer, row[end - length : end].tolist(), skip_special_tokens=True)
            for row, end, length in zip(output["output_ids"], ends, sampled, strict=True)
        ]


def _conversations(data: Mapping[str, Any]) -> list[Conversation] | None:
    """The conversation of each row: its `messages`, or a user message with its `prompt` or `question`; None without them."""
    column = next((name for name in ("messages", "prompt", "question") if name in data), None)
    return None if column is None else [*map(_as_messages, data[column])]


def _as_messages(prompt: str | Conversation) -> Conversation:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
