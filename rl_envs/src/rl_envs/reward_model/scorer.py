"""A reward model of Transformers: conversations as tokens in, one score each out; knows no environment and no reward.

The model is a classifier of one label on a decoder (`LlamaForSequenceClassification` and its like). A conversation's score is
what its head says after the last token, whichever token that is: Transformers' own forward pass looks for the last one that
is not the padding token, and so passes over an end of turn that the tokenizer also pads with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from rl_core.errors import ConfigError, UserError

_HEAD: Final = "score"
_CLASSIFIER: Final = "ForSequenceClassification"


class RewardModelScorer:
    """The model, frozen and without dropout.

    Args:
        name: folder of the model, or its name on the hub.
        dtype: of weights and activations; scores are float32.
        device: where it computes.
        batch_size: conversations of one forward pass.

    Raises:
        UserError: it cannot be loaded, or is no reward model.
    """

    def __init__(self, name: str, *, dtype: torch.dtype, device: torch.device, batch_size: int) -> None:
        self._batch_size, self._device = batch_size, device
        self._model = load_reward_model(name, dtype=dtype).to(device)

    @torch.inference_mode()
    def scores(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """[B] float32, the score of each row of token ids, none of them empty.

        Rows of like length share a forward pass. They are padded on the right, where causal attention needs no mask.
        """
        found = torch.zeros(len(rows), dtype=torch.float32)
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        for start in range(0, len(order), self._batch_size):
            places = order[start : start + self._batch_size]
            found[places] = self._of_batch([rows[place] for place in places]).cpu()
        return found

    def _of_batch(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(self._device)
        hidden = self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        last = torch.tensor([len(row) - 1 for row in rows], device=self._device)
        read = hidden[torch.arange(len(rows), device=self._device), last]
        weight = getattr(self._model, _HEAD).weight
        # In float32 whatever the model's type: bfloat16 would round scores of about 2 to hundredths.
        return torch.nn.functional.linear(read.float(), weight.float()).squeeze(-1)


def load_reward_model(name: str, *, dtype: torch.dtype) -> Any:
    """The model in evaluation mode, on the CPU.

    Raises:
        UserError: there is none, it cannot be read, or it has no head of one score.
    """
    transformers = _transformers()
    _refuse_folder(name)
    config = _explained(name, lambda: transformers.AutoConfig.from_pretrained(name))
    _refuse_another_kind(name, config)
    model, report = _explained(
        name,
        lambda: transformers.AutoModelForSequenceClassification.from_pretrained(
            name, config=config, dtype=dtype, output_loading_info=True
        ),
    )
    head = getattr(model, _HEAD, None)
    shapes = {key: tuple(tensor.shape) for key, tensor in head.named_parameters()} if head is not None else {}
    if shapes != {"weight": (1, getattr(head, "in_features", 0))}:
        raise UserError(
            f"{name} is a {type(model).__name__}, and this environment reads a head `{_HEAD}` of one row without bias, as "
            "classifiers on decoders have (LlamaForSequenceClassification, Qwen2ForSequenceClassification...)."
        )
    if torn := sorted(map(str, report["missing_keys"])):
        raise UserError(f"{name} is torn: it lacks {len(torn)} weights, the first {torn[0]}. Save or download it again.")
    return model.eval().requires_grad_(False)


def _refuse_folder(name: str) -> None:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise ConfigError(f"model_name: the folder {name} does not exist (looked at {folder.absolute()}).")
        return
    if (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"model_name: {name} holds a LoRA adapter alone, and a reward model is whole weights. Merge it into its base: "
            "`rlcore convert CHECKPOINT --to hf --merge OUTPUT`, and name OUTPUT here."
        )
    raise ConfigError(
        f"model_name: {name} holds no config.json, so it is no model of Transformers. Of a checkpoint of a reward model, name "
        "the folder step_<n>/policy/weights."
    )


def _refuse_another_kind(name: str, config: Any) -> None:
    architectures: Sequence[str] = getattr(config, "architectures", None) or ()
    if not any(each.endswith(_CLASSIFIER) for each in architectures):
        kind = architectures[0] if architectures else type(config).__name__
        raise ConfigError(
            f"model_name: {name} is a {kind}, which has no head that scores: its rewards would be noise. Train a reward model "
            "from it (algorithm `rm`, `rlcore train examples/rm_addition.yaml`), or name one that was."
        )
    if config.num_labels != 1:
        raise ConfigError(
            f"model_name: {name} is a {architectures[0]} of {config.num_labels} labels, and a reward is one number: name a "
            "model of one label."
        )


def _explained(name: str, load: Any) -> Any:
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


def conversation_tokens(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[int]:
    """The whole conversation's tokens, as rows of preferences have them: under the chat template, or without one end to end.

    It is rendered at once, so that whatever a model wrote can be scored: pieces that merge, or that a template rewrites, are
    of no matter where nothing is trained on them.

    Raises:
        ConfigError: the chat template cannot render it.
    """
    from jinja2.exceptions import TemplateError

    from rl_core.data.messages import get_formatted_message_log

    spoken = [{"role": message["role"], "content": message["content"]} for message in messages]
    if not getattr(tokenizer, "chat_template", None):
        pieces = get_formatted_message_log(spoken, tokenizer)
        return [token for piece in pieces for token in piece["token_ids"].tolist()]
    try:
        text = tokenizer.apply_chat_template(spoken, tokenize=False)
    except TemplateError as error:
        roles = [message["role"] for message in spoken]
        raise ConfigError(f"the reward model's chat template cannot render messages of the roles {roles}: {error}") from error
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens
