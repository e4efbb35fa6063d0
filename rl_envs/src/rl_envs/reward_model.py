"""The environment `reward_model`: the reward of a conversation is its score by a trained reward model of Transformers.

The model is a decoder with a classification head for one label, such as `LlamaForSequenceClassification`. The score is the
output of the head at the last token. Transformers' own forward pass uses the last token that is not the padding token, which
skips an end-of-turn token that is also used for padding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.hub import pretrained_location, require_model
from rl_core.data.loaded_model import check_loaded, exact_attention, report_as_error
from rl_core.data.tokenizer import conversation_tokens, load_tokenizer
from rl_core.environments import Score, ScorerEnvironment
from rl_core.errors import ConfigError, DataError, UserError
from rl_core.interfaces.environment import Conversation
from rl_envs.config import RewardModelEnvironmentConfig

SCORE_KEY = "reward_model"
"""Metadata key of the score."""
_HEAD: Final = "score"
_CLASSIFIER: Final = "ForSequenceClassification"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class RewardModelEnvironment(ScorerEnvironment):
    """Scores whole conversations with the reward model's tokenizer and chat template; every row ends.

    The reward is `scale * (score - shift)`. `step` adds `reward_model` to a row's metadata: the `score`, and `is_cut` if the
    row was longer than `max_length`. Equal rows in equal batches have equal rewards.

    Args:
        config: `RewardModelEnvironmentConfig`, or a dict of its keys. `num_workers` is the number of
            environment workers; each has a copy of the model.

    Raises:
        UserError: `model_name` is not a reward model, or the device is not available.
    """

    config_class = RewardModelEnvironmentConfig
    config: RewardModelEnvironmentConfig

    def __init__(self, config: RewardModelEnvironmentConfig | Mapping[str, Any]) -> None:
        super().__init__(config)
        self._scorer = RewardModelScorer(
            self.config.model_name,
            dtype=_DTYPES[self.config.precision],
            device=_device(self.config.device),
            batch_size=self.config.batch_size,
        )
        self._tokenizer = load_tokenizer(
            self.config.tokenizer_name or self.config.model_name,
            model_name=self.config.model_name,
            chat_template=self.config.chat_template,
            chat_template_kwargs=self.config.chat_template_kwargs,
        )

    def score_batch(self, message_log_batch: list[Conversation], metadata: list[Any]) -> list[Score]:
        """Score B conversations, prompt and answers together.

        Raises:
            DataError: A conversation has no tokens.
        """
        rows = [reward_tokens(log, self._tokenizer) for log in message_log_batch]
        for log, row in zip(message_log_batch, rows, strict=True):
            if not row:
                raise DataError(f"A conversation has no tokens, so it cannot be scored: {log}")
        longest = self.config.max_length
        scores = self._scorer.scores([row[-longest:] for row in rows])
        rewards = self.config.scale * (scores - self.config.shift)
        return [
            Score(reward, metadata={SCORE_KEY: {"score": score, "is_cut": len(row) > longest}}, reply=f"{score:.3f}")
            for row, score, reward in zip(rows, scores.tolist(), rewards.tolist(), strict=True)
        ]

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        """`score_mean`, `score_std`, `score_min`, `score_max`, before shift and scale, and `cut_frac`."""
        infos = [info[SCORE_KEY] for info in batch["extra_env_info"]]
        scores = torch.tensor([each["score"] for each in infos])
        return batch, {
            "score_mean": float(scores.mean()),
            "score_std": float(scores.std(correction=0)),
            "score_min": float(scores.min()),
            "score_max": float(scores.max()),
            "cut_frac": sum(each["is_cut"] for each in infos) / len(infos),
        }


def _device(wanted: str) -> torch.device:
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device: cuda, but torch {torch.__version__} sees no GPU in the environment's process. Use auto, or give the "
            "process a GPU."
        )
    return torch.device(wanted)


def reward_tokens(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[int]:
    """The tokens of the whole conversation, as in preference training: with the chat template, or concatenated without one.

    The conversation is rendered in one call, so that any model output can be scored: tokens that merge across messages, or
    that a template rewrites, do not matter because nothing is trained on them. Texts of special tokens in the model's messages
    are removed: with `<|im_end|>` and `<|im_start|>`, an answer could add turns of a satisfied user.

    Raises:
        ConfigError: The chat template cannot render the conversation.
    """
    special = _special_texts(tokenizer)
    plain = [
        {
            "role": message["role"],
            "content": _without(special, message["content"]) if message["role"] == "assistant" else message["content"],
        }
        for message in messages
    ]
    try:
        return conversation_tokens(plain, tokenizer)
    except DataError as error:
        raise ConfigError(f"The reward model cannot score the conversation: {error}.") from error


def _special_texts(tokenizer: Any) -> re.Pattern[str] | None:
    """Matches the texts of the tokenizer's special tokens; None if it has none."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    texts = sorted({str(token) for token in added if token.special and str(token)}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def _without(special: re.Pattern[str] | None, text: str) -> str:
    """The text without special tokens, also without those that only the removal of others brings together."""
    while special is not None and special.search(text):
        text = special.sub("", text)
    return text


class RewardModelScorer:
    """The model, frozen and without dropout.

    Args:
        name: Folder of the model, or its name on the Hugging Face Hub, at a revision with `owner/name@revision`.
        dtype: Data type of weights and activations; scores are float32.
        device: Device of the model.
        batch_size: Number of conversations per forward pass.

    Raises:
        UserError: It cannot be loaded or is not a reward model.
    """

    def __init__(self, name: str, *, dtype: torch.dtype, device: torch.device, batch_size: int) -> None:
        self._batch_size, self._device = batch_size, device
        self._model = load_reward_model(name, dtype=dtype).to(device)

    @torch.inference_mode()
    def scores(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """[B] float32, the score of each row of token ids; rows must not be empty.

        Rows of similar length share a forward pass. They are right-padded, so causal attention needs no mask.
        """
        scores = torch.zeros(len(rows), dtype=torch.float32)
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        for start in range(0, len(order), self._batch_size):
            indices = order[start : start + self._batch_size]
            scores[indices] = self._score_batch([rows[index] for index in indices]).cpu()
        return scores

    def _score_batch(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(self._device)
        hidden = self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        last = torch.tensor([len(row) - 1 for row in rows], device=self._device)
        read = hidden[torch.arange(len(rows), device=self._device), last]
        weight = getattr(self._model, _HEAD).weight
        # In float32 for any model precision: bfloat16 would round scores near 2 to about 0.01.
        return torch.nn.functional.linear(read.float(), weight.float()).squeeze(-1)


def load_reward_model(name: str, *, dtype: torch.dtype) -> Any:
    """The model in evaluation mode, on the CPU.

    Raises:
        UserError: It does not exist, cannot be read, or has no head with one output.
    """
    transformers = _transformers()
    _check_folder(name)
    location, options = pretrained_location(name)
    config = _load_or_explain(name, lambda: transformers.AutoConfig.from_pretrained(location, **options))
    _check_architecture(name, config)
    attention = exact_attention(config, transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None))
    loading: dict[str, Any] = {
        "config": config,
        "attn_implementation": attention,
        "dtype": dtype,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
        **options,
    }
    with report_as_error(name):
        model, report = _load_or_explain(
            name, lambda: transformers.AutoModelForSequenceClassification.from_pretrained(location, **loading)
        )
    head = getattr(model, _HEAD, None)
    shapes = {key: tuple(tensor.shape) for key, tensor in head.named_parameters()} if head is not None else {}
    if shapes != {"weight": (1, getattr(head, "in_features", 0))}:
        raise UserError(
            f"{name} is a {type(model).__name__}. This environment needs a head `{_HEAD}` with one output and no bias, as in "
            "LlamaForSequenceClassification or Qwen2ForSequenceClassification."
        )
    check_loaded(model, report, name=name)
    for parameter in model.parameters():  # mapped from a file, which may be overwritten in place
        parameter.data = parameter.data.clone()
    return model.eval().requires_grad_(False)


def _check_folder(name: str) -> None:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        try:
            require_model(name)
        except DataError as error:
            raise ConfigError(f"model_name: {error}.") from error
        return
    if (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"model_name: {name} contains only a LoRA adapter, but a reward model needs full weights. Merge it into its base "
            "model with `rlcore convert CHECKPOINT --to hf --merge OUTPUT` and set model_name to OUTPUT."
        )
    raise ConfigError(
        f"model_name: {name} has no config.json, so it is not a Transformers model. For a checkpoint of a reward model, use "
        "its folder step_<n>/policy/weights."
    )


def _check_architecture(name: str, config: Any) -> None:
    architectures: Sequence[str] = getattr(config, "architectures", None) or ()
    if not any(each.endswith(_CLASSIFIER) for each in architectures):
        kind = architectures[0] if architectures else type(config).__name__
        raise ConfigError(
            f"model_name: {name} is a {kind}, which has no classification head, so its rewards would be random. Train a reward "
            "model from it (algorithm `rm`, `rlcore train examples/rm_addition.yaml`), or use one."
        )
    if config.num_labels != 1:
        raise ConfigError(
            f"model_name: {name} is a {architectures[0]} with {config.num_labels} labels, but a reward is one number: use a "
            "model with one label."
        )


def _load_or_explain(name: str, load: Any) -> Any:
    try:
        return load()
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise UserError(f"model_name: {name} cannot be loaded: {type(error).__name__}: {error}") from error


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            f"The environment `reward_model` needs Transformers: {error}. Install it with `pip install "
            "'rl-envs[reward-model]'`."
        ) from error
    return transformers
