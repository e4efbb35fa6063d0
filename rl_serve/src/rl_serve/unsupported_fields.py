"""Fields of OpenAI's and vLLM's API that the server does not support: refused, unless their value changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rl_serve.errors import ApiError

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "detokenize": (True,),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_p": (0,),
    "min_tokens": (0,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "priority": (0,),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "store": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
}
"""Values with which an unsupported field of OpenAI's or vLLM's API changes nothing, besides null."""


def refuse_unsupported_fields(fields: Mapping[str, Any], *, no_ops: Collection[str] = (), where: str = "") -> None:
    """Refuse fields that the server does not support and that would change a completion.

    Args:
        fields: the fields that a request has and its model does not declare.
        no_ops: those that change nothing, whatever their value.
        where: path of the fields in the request, with a final dot.

    Raises:
        ApiError: names all of them.
    """
    refused = sorted(
        where + name
        for name, value in fields.items()
        if value is not None and name not in no_ops and value not in _NEUTRAL.get(name, ())
    )
    if refused:
        raise ApiError(
            400,
            f"Unsupported: {', '.join(refused)}. Remove {'it' if len(refused) == 1 else 'them'}.",
            param=refused[0],
            code="unsupported_parameter",
        )
