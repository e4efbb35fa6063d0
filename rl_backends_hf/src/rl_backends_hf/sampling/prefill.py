"""Attention and masks of the sampler: prefills of prompts or of the new tokens of a turn, and decoding one token per row.

With a mask, Transformers repeats keys and values for every query head of a group before SDPA, which copies the whole cache
several times per token. While decoding, the query heads of a group are therefore treated as query positions of their key head,
so nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from transformers import DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rl_backends_base.rows import Row
from rl_backends_hf.cpu_attention import is_plain, refuse_ignored
from rl_backends_hf.pictures import Pictures, call_with_pictures, has_rope_grid, rope_positions
from rl_backends_hf.sampling.kv_cache import SlotCache, SlotLayer
from rl_backends_hf.sampling.rows import CachedPrefix, PromptGroup
from rl_backends_hf.sampling.shared_prompts import attend_by_products, prefers_products
from rl_backends_hf.scoring.probe import refusing_errors, tolerance
from rl_backends_hf.scoring.token_scoring import chunked_scores, logit_transform
from rl_backends_hf.transformers_internals import attention_of, cache_keyword, layers_of, takes_other_attention
from rl_core.data.batched_data_dict import to_device

_SCORED_LOGITS: Final = 2**24
"""Number of logits that exist at one time while prompts are scored: 64 MiB in float32."""


@dataclass(frozen=True, kw_only=True)
class PrefillPlan:
    """Groups of rows that are computed together; either all of them have a prefix, or none has.

    Attributes:
        groups: one row of the forward pass each.
        prefixes: keys and values of each group's first tokens.
    """

    groups: list[PromptGroup]
    prefixes: list[CachedPrefix]

    @property
    def past(self) -> list[int]:
        """Number of tokens at the start of each group's prompt whose keys and values are reused, not computed."""
        return [len(prefix.tokens) for prefix in self.prefixes] or [0] * len(self.groups)

    def pictures(self) -> Pictures | None:
        """Pictures with features among the tokens to compute, if there are any."""
        pairs = zip(self.groups, self.past, strict=True)
        images = [image for group, past in pairs for image in group.images if image.end > past]
        return Pictures.of(images) if images else None

    def has_space_for(self, group: PromptGroup, *, max_tokens: int) -> bool:
        """Whether the prefill has at most `max_tokens` padded tokens with one more group."""
        return (len(self.groups) + 1) * max(len(each.prompt) for each in (*self.groups, group)) <= max_tokens


def prefill(
    model: PreTrainedModel, plan: PrefillPlan, scorer: PromptScorer | None = None, *, cache: DynamicCache | None = None
) -> tuple[torch.Tensor, DynamicCache]:
    """Logits [N, V] of the token after each group's prompt, and keys and values; `scorer` sets the scores of prompts.

    The cache has left-padded columns of the prefixes, if there are any, and then left-padded columns of new tokens. `Row.state`
    becomes the distance from the number of a token to its position, for rows with images that change it. `cache` is an empty
    one for models that keep something other than keys and values.
    """
    # Computed on the host, which knows all of it, and copied to the device at the end.
    device = model.get_input_embeddings().weight.device
    past = torch.tensor(plan.past).unsqueeze(1)
    pictures = plan.pictures()
    new = [group.tokens(pictures)[kept:] for group, kept in zip(plan.groups, plan.past, strict=True)]
    past_width, width = max(plan.past), max(map(len, new))
    padding = [width - len(tokens) for tokens in new]
    ids = torch.tensor([[0] * pad + tokens for pad, tokens in zip(padding, new, strict=True)])
    is_new = torch.arange(width) >= torch.tensor(padding).unsqueeze(1)
    is_past = torch.arange(past_width) >= past_width - past
    mask = torch.cat([is_past, is_new], dim=1)
    positions = (is_new.cumsum(dim=1) - 1).clamp_(min=0) + past
    if has_rope_grid(model) and any(group.images for group in plan.groups):
        positions = _with_coordinates(model, plan, positions)
    cache = DynamicCache() if cache is None else cache
    for number, layer in enumerate(zip(*(prefix.layers for prefix in plan.prefixes), strict=True)):
        keys, values = zip(*layer, strict=True)
        cache.update(_left_padded(keys, past_width), _left_padded(values, past_width), number)
    arguments: dict[str, Any] = {
        "attention_mask": None if bool(mask.all()) else to_device(mask, device),
        "position_ids": to_device(positions, device),
        "use_cache": True,
        cache_keyword(model): cache,
        # A tensor, because the model would use a number for a slice, which is not contiguous: for such an input, torch's linear
        # layers on CPUs copy their weight, here that of the LM head, once per row.
        "logits_to_keep": to_device(torch.tensor([width - 1]), device),
    }
    on_device = to_device(ids, device)
    with nullcontext() if scorer is None else scorer.scoring(plan, width=width):
        if pictures is None:
            return model(input_ids=on_device, **arguments).logits[:, -1], cache
        return call_with_pictures(model, model, on_device, pictures, **arguments).logits[:, -1], cache


class PromptScorer:
    """Computes the log-probabilities of prompts from the hidden states of their prefill, with few logits at one time.

    Args:
        model: a causal LM whose logits are those of its LM head on its backbone's last hidden states.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._backbone, self._head = model.base_model, model.get_output_embeddings()
        self._transform = logit_transform(model.config, temperature=1.0)

    @classmethod
    def of(cls, model: PreTrainedModel) -> PromptScorer | None:
        """The scorer of a model; None if a few tokens show that its logits are computed in another way."""
        head, hidden = model.get_output_embeddings(), list[torch.Tensor]()
        if not isinstance(head, torch.nn.Linear) or model.base_model is model:
            return None
        scorer = cls(model)
        embedding = model.get_input_embeddings().weight
        ids = (torch.arange(4, device=embedding.device) % len(embedding)).unsqueeze(0)
        with torch.no_grad(), refusing_errors(model, "be sampled from; use another generation backend"):
            with scorer._hidden_states(hidden):
                logits = model(input_ids=ids, use_cache=False).logits.float()
            if [states.shape[-1] for states in hidden] != [head.in_features]:
                return None
            own = scorer._transform(head(hidden[0]))
        difference = float((own.log_softmax(dim=-1) - logits.log_softmax(dim=-1)).abs().max())
        return scorer if difference <= tolerance(model.dtype) else None

    @contextmanager
    def scoring(self, plan: PrefillPlan, *, width: int) -> Iterator[None]:
        """Score the prompts of rows that lack their scores with the forward pass in the block, of `width` columns."""
        lacking = [[row for row in group.rows if row.lacks_prompt_scores] for group in plan.groups]
        if not any(lacking):
            yield
            return
        hidden = list[torch.Tensor]()
        with self._hidden_states(hidden):
            yield
        for rows, states, group in zip(lacking, hidden[0], plan.groups, strict=True):
            if rows:
                self._score(rows, states[width - len(group.prompt) :])

    def _score(self, rows: Sequence[Row], hidden: torch.Tensor) -> None:
        """Set the scores of rows with the same tokens, whose hidden states are [T, H]."""
        prompt, most = rows[0].prompt.tokens, max(row.num_prompt_likely or 0 for row in rows)
        ids, logprobs = chunked_scores(
            hidden[: len(prompt) - 1],
            self._head,
            to_device(torch.tensor(prompt[1:], dtype=torch.int64).unsqueeze(1), hidden.device),
            k=min(most, self._head.out_features),
            transform=self._transform,
            chunk=max(1, _SCORED_LOGITS // self._head.out_features),
        )
        scores = [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), logprobs.tolist(), strict=True)]
        for row in rows:
            row.prompt_scores = [[], *(scored[: 1 + (row.num_prompt_likely or 0)] for scored in scores)]

    @contextmanager
    def _hidden_states(self, hidden: list[torch.Tensor]) -> Iterator[None]:
        """Append the backbone's last hidden states [N, T, H] of each forward pass in the block."""

        def append(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(states := getattr(output, "last_hidden_state", None), torch.Tensor):
                hidden.append(states)

        handle = self._backbone.register_forward_hook(append)
        try:
            yield
        finally:
            handle.remove()


def _with_coordinates(model: PreTrainedModel, plan: PrefillPlan, positions: torch.Tensor) -> torch.Tensor:
    """Coordinates [3, N, width] of new tokens, instead of `positions` [N, width]; sets `Row.state` of rows with images."""
    coordinates = positions.expand(3, *positions.shape).clone()
    for number, (group, past) in enumerate(zip(plan.groups, plan.past, strict=True)):
        if not group.images:
            continue
        tokens = torch.tensor([group.tokens(Pictures.of(group.images))])
        own = rope_positions(model, tokens, torch.tensor([tokens.shape[1]]), [group.images])
        assert own is not None
        coordinates[:, number, positions.shape[1] - (tokens.shape[1] - past) :] = own[:, 0, past:]
        for row in group.rows:
            row.state = int(own.max()) + 1 - tokens.shape[1]
    return coordinates


def _left_padded(tensors: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """[N, heads, width, head_dim] from N tensors [heads, length, head_dim]."""
    first = tensors[0]
    padded = first.new_zeros((len(tensors), first.shape[0], width, first.shape[2]))
    for row, tensor in enumerate(tensors):
        padded[row, :, width - tensor.shape[1] :] = tensor
    return padded


GROUPED = "rlcore_grouped_sdpa"
_FULL, _SLIDING = "full_attention", "sliding_attention"


def grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    slot_cache: SlotCache | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """SDPA with the signature that Transformers expects, without repeating keys and values when decoding one token per row.

    Args:
        module: the attention layer.
        query: [N, query heads, 1, D].
        key: [N, key heads, K, D].
        value: [N, key heads, K, D'].
        attention_mask: [N, 1, 1, K]; bool, or added to the scores.
        slot_cache: the rows' cache if they share prompts.
        **kwargs: as Transformers passes them; `scaling` is the factor of the scores.
    """
    refuse_ignored(module, kwargs)
    rows, heads, length, width = query.shape
    grouped, scale = query.reshape(rows, key.shape[1], -1, width), kwargs.get("scaling")
    adds_mask = attention_mask is not None and attention_mask.is_floating_point() and is_plain(module, kwargs)
    layer, prompts = (None, None) if slot_cache is None else (slot_cache.layers[module.layer_idx], slot_cache.prompts)
    if attention_mask is not None and adds_mask and isinstance(layer, SlotLayer) and layer.holds(key, value):
        assert layer.prompts is not None
        assert prompts is not None
        output = prompts.attend(grouped, layer.prompts, (key, value), attention_mask, scale=scale)
    elif length == 1 and attention_mask is not None and adds_mask and prefers_products(query.device, query.dtype):
        output = attend_by_products(grouped, key, value, attention_mask, scale=scale)
    elif length > 1 or heads == key.shape[1] or kwargs.get("position_bias") is not None or kwargs.get("cache") is not None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return output, None
    else:
        output = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scale)
    return output.reshape(rows, 1, heads, value.shape[-1]), None


ALL_ATTENTION_FUNCTIONS.register(GROUPED, grouped_sdpa)
ALL_MASK_ATTENTION_FUNCTIONS.register(GROUPED, sdpa_mask)


@contextmanager
def decoding_attention(model: PreTrainedModel) -> Iterator[None]:
    """Use `grouped_sdpa` instead of SDPA or flash attention in `model` while the block runs."""
    before = attention_of(model)
    if before == "eager" or not takes_other_attention(model):
        yield
        return
    model.set_attn_implementation(GROUPED)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@dataclass(frozen=True, kw_only=True)
class AttentionLayout:
    """Attention pattern of a model's layers.

    Attributes:
        num_layers: number of layers with keys and values.
        kinds: `full_attention`, `sliding_attention` or both.
        window: size in tokens of the sliding window.
    """

    num_layers: int
    kinds: frozenset[str]
    window: int | None

    @classmethod
    def of(cls, model: PreTrainedModel) -> AttentionLayout | None:
        """Read the layout from a model's config; None if a layer keeps something else, such as a recurrent state."""
        text = model.config.get_text_config(decoder=True)
        kinds, arguments = layers_of(text)
        recurrent = "recurrent" in getattr(text, "layers_block_type", ())  # RecurrentGemma has no `layer_types`
        windows = {entry["sliding_window"] for entry in arguments if "sliding_window" in entry}
        if recurrent or not {*kinds} <= {_FULL, _SLIDING} or len(windows) > 1:
            return None
        return cls(num_layers=len(kinds), kinds=frozenset(kinds), window=next(iter(windows), None))

    def mask(self, cache: SlotCache, *, score_dtype: torch.dtype | None) -> torch.Tensor | dict[str, torch.Tensor]:
        """Mask [N, 1, 1, K] for the model's forward pass, or one mask per layer type.

        Args:
            cache: the rows.
            score_dtype: dtype of the scores to which the mask is added; None for a bool mask, which SDPA takes.
        """
        masks = {
            kind: _shaped(cache.attendable(window=self.window if kind == _SLIDING else None), score_dtype)
            for kind in self.kinds
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))


def _shaped(seen: torch.Tensor, score_dtype: torch.dtype | None) -> torch.Tensor:
    seen = seen[:, None, None, :]
    if score_dtype is None:
        return seen
    return torch.zeros_like(seen, dtype=score_dtype).masked_fill_(~seen, torch.finfo(score_dtype).min)
