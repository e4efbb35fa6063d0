"""Loads tokenizers, prepares them for batching, and turns text and conversations without tools into tokens and back."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

from rl_core.config.policy_sections import TokenizerConfig
from rl_core.config.section import check_template_kwargs
from rl_core.data.hub import names_code, pretrained_location, published_file, require_model
from rl_core.errors import DataError
from rl_core.plugins.component import describe, nearest
from rl_core.plugins.import_path import resolve

TOKENIZER_CODE = "tokenizer_code.txt"
"""File next to the weights of a model whose tokenizer is code: its import path, then the names of its files, one a line."""
_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken*")
_PIPELINE = ("normalizer", "pre_tokenizer", "decoder")
_BPE = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback", "ignore_merges")
# Ways to split text in llama.cpp: with whole words before merges and a start token by default; and those that split as GPT-2
# does, or also split off digits, which no merge of such a vocabulary joins.
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
_GPT2 = (None, "default", "gpt-2", "phi-2", "mpt", "olmo", "roberta-bpe", "smollm", "starcoder", "refact", "minerva-7b")


def load_tokenizer(
    name_or_path: str | Path,
    *,
    model_name: str | Path | None = None,
    chat_template: str | Path | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """A Transformers tokenizer that pads on the right and has a padding token.

    A tokenizer without a padding token pads with its EOS token; padding is never read, since every batch has lengths and
    masks.

    Args:
        name_or_path: A model's name, a folder, a GGUF file, or `module:name`, which is called with `model_name` and returns a
            `rl_core.data.adapted_tokenizer.Tokenizer` or a Transformers tokenizer. A model's files never choose the code.
        model_name: The model of a tokenizer that is named by its import path.
        chat_template: Replaces the tokenizer's own: the Jinja text, or the path of a file.
        chat_template_kwargs: Variables for the template; see `with_template_kwargs`.
        trust_remote_code: Whether to run code that comes with the tokenizer.

    Raises:
        DataError: The tokenizer does not exist, is code that `name_or_path` does not name, has neither a padding nor an EOS
            token, or its template does not use one of the variables.
    """
    require_model(str(name_or_path), query_cached=True)
    own = names_code(str(name_or_path))
    model = str(model_name) if own and model_name is not None else str(name_or_path)
    if (record := published_file(model, TOKENIZER_CODE)) is not None:
        if not own:
            code = record.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
            raise DataError(
                f"the tokenizer of {model!r} is code that you must name: policy.tokenizer.name={code!r} or --tokenizer"
            )
        chat_template = chat_template or published_file(model, "chat_template.jinja")
    tokenizer = _from_code(str(name_or_path), model_name) if own else _published(name_or_path, trust_remote_code)
    if chat_template is not None:
        tokenizer.chat_template = _template_text(chat_template)
    if chat_template_kwargs:
        tokenizer.chat_template = with_template_kwargs(tokenizer.chat_template, chat_template_kwargs)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise DataError(f"the tokenizer of {str(name_or_path)!r} has neither a padding nor an EOS token: set `pad_token`")
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer


def _published(name_or_path: str | Path, trust_remote_code: bool) -> Any:
    """The Transformers tokenizer of a model's files."""
    from transformers import AutoTokenizer

    try:
        location, options = pretrained_location(str(name_or_path))
        loaded = AutoTokenizer.from_pretrained(location, trust_remote_code=trust_remote_code, **options)
        tokenizer = _corrected(loaded, str(name_or_path))
        if "gguf_file" in options:
            _restore(tokenizer, Path(name_or_path).expanduser())
    except ImportError as error:
        raise DataError(f"reading {str(name_or_path)!r} requires a package that is not installed: {error}") from error
    except (OSError, ValueError) as error:
        # Transformers' own text for such a folder suggests packages to install.
        reason = "it has no tokenizer files" if _lacks_tokenizer(Path(name_or_path)) else str(error).rstrip(".")
        raise DataError(
            f"cannot load a tokenizer from {str(name_or_path)!r}: {reason}. Use a model's name, a folder with its tokenizer "
            "files, a .gguf file, or the import path of a tokenizer (docs/config.md)"
        ) from error
    tokenizer.published_padding = tokenizer.padding_side, tokenizer.pad_token
    return tokenizer


def _from_code(path: str, model_name: str | Path | None) -> Any:
    """The tokenizer that a class or function returns."""
    from transformers import PreTrainedTokenizerBase

    from rl_core.data.adapted_tokenizer import AdaptedTokenizer

    try:
        tokenizer = resolve(path, key="tokenizer.name")(None if model_name is None else str(model_name))
        return tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else AdaptedTokenizer(tokenizer, path)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"cannot load the tokenizer {path} of {str(model_name)!r}: {describe(error)}") from error


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer's files, without the padding that `load_tokenizer` has set."""
    side, pad_token = getattr(tokenizer, "published_padding", (None, None))
    if side is not None:
        tokenizer = deepcopy(tokenizer)
        tokenizer.padding_side = side if tokenizer.padding_side == "right" else tokenizer.padding_side
        tokenizer.pad_token = pad_token if tokenizer.pad_token == tokenizer.eos_token else tokenizer.pad_token
    tokenizer.save_pretrained(folder)


def _corrected(tokenizer: Any, name: str) -> Any:
    """The tokenizer of `tokenizer.json` if a class such as LlamaTokenizer has taken only its vocabulary; else the same one."""
    from transformers import PreTrainedTokenizerFast as Fast

    kind, tokenizer.is_corrected = type(tokenizer), False
    builds = issubclass(kind, Fast) and kind is not Fast and "__init__" in vars(kind)
    if not builds or (file := published_file(name, "tokenizer.json")) is None:
        return tokenizer
    both = tokenizer.backend_tokenizer, _without_vocabulary(file)
    settings = [[getattr(each.model, key, None) or None for key in _BPE] for each in both]
    pipelines = [pickle.dumps([getattr(each, key) for key in _PIPELINE]) for each in both]
    if settings[0] != settings[1] or pipelines[0] != pipelines[1]:
        location, options = pretrained_location(name)
        corrected = Fast.from_pretrained(location, **options)
        corrected.is_corrected, words = True, corrected.get_vocab()
        for each, token in tokenizer.special_tokens_map.items():  # some only have the class's default
            if str(token) in words and getattr(corrected, each) is None:
                setattr(corrected, each, token)
        return corrected
    return tokenizer


def _restore(tokenizer: Any, file: Path) -> None:
    """Set what llama.cpp reads from a GGUF file and Transformers ignores: start and end tokens, whole words."""
    from transformers.integrations.gguf import gguf_tokenizer_mapping, read_gguf_metadata

    values, backend = read_gguf_metadata(str(file))[0], tokenizer.backend_tokenizer
    kind, split = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre")
    if kind == "gpt2" and split not in (*gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS, *_GPT2):
        raise ValueError(f"Transformers does not split text as the file says (tokenizer.ggml.pre: {split})")
    prepends = getattr(backend.pre_tokenizer, "prepend_scheme", "never") != "never"
    if prepends and not values.get("tokenizer.ggml.add_space_prefix", True):
        raise ValueError("Transformers adds a space, but the file forbids it (tokenizer.ggml.add_space_prefix)")
    if split in _WHOLE_WORDS:
        backend.model.ignore_merges = True
    adds_bos = values.get("tokenizer.ggml.add_bos_token", kind == "llama" or split in _WHOLE_WORDS)
    tokenizer.add_bos_token = bool(adds_bos and tokenizer.bos_token)
    tokenizer.add_eos_token = bool(values.get("tokenizer.ggml.add_eos_token"))


def _without_vocabulary(file: Path) -> Any:
    """The tokenizer of a `tokenizer.json` without its vocabulary, which takes seconds to parse."""
    from tokenizers import Tokenizer

    # What comes after the vocabulary, usually nothing, is not found, so the file counts as another tokenizer.
    text = file.read_bytes().partition(b'"vocab":')[0].decode()
    parse, key, position = json.JSONDecoder().raw_decode, re.compile(r'[\s,{]*"(\w+)"\s*:\s*'), 0
    found: dict[str, Any] = {}
    while name := key.match(text, position):
        position = name.end()
        if name[1] != "model":  # its settings follow
            found[name[1]], position = parse(text, position)
    model = {"type": "BPE", "vocab": {}, "merges": [], **{name: found[name] for name in _BPE if name in found}}
    return Tokenizer.from_str(json.dumps({**{name: found.get(name) for name in _PIPELINE}, "model": model}))


def find_tokenizer(model_name: str | Path, section: TokenizerConfig, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a section `tokenizer`, or the model's; None if none is named and the model's folder has none.

    Raises:
        DataError: The tokenizer exists or is named, but cannot be loaded.
    """
    # If there is no tokenizer, Transformers may return an empty one.
    if section.name is None and _lacks_tokenizer(Path(model_name).expanduser()):
        return None
    return load_tokenizer(
        section.name or model_name,
        model_name=model_name,
        chat_template=section.chat_template,
        chat_template_kwargs=section.chat_template_kwargs,
        trust_remote_code=trust_remote_code,
    )


def with_template_kwargs(template: Any, kwargs: Mapping[str, Any]) -> Any:
    """Add default values of variables to a chat template: its Jinja text, or texts by name.

    They become part of the template's text, so that it renders the same everywhere, also from a saved checkpoint.

    Raises:
        DataError: There is no template, or it does not use a variable.
    """
    try:
        check_template_kwargs(dict(kwargs))
    except ValueError as error:
        raise DataError(f"chat_template_kwargs: {error}") from error
    texts = list(template.values()) if isinstance(template, Mapping) else [template or ""]
    words = set(re.findall(r"[^\W\d]\w*", " ".join(texts)))
    for name in kwargs:
        if name not in words:
            meant = nearest(name, words)
            hint = f"; did you mean {meant!r}?" if meant else ""
            problem = f"the chat template does not use {name!r}{hint}" if words else "the tokenizer has no chat template"
            raise DataError(
                f"chat_template_kwargs: {problem}, so the value would have no effect. Remove it, or use a template that "
                "uses it (chat_template)"
            )
    # Transformers removes only one line break after a block.
    defaults = "".join(f"{{% if {n} is not defined %}}{{% set {n} = {v!a} %}}{{% endif %}}" for n, v in kwargs.items()) + "\n"
    return {n: defaults + text for n, text in template.items()} if isinstance(template, Mapping) else defaults + template


def _lacks_tokenizer(path: Path) -> bool:
    """Whether it is a folder without files of a Transformers tokenizer."""
    return path.is_dir() and ((path / TOKENIZER_CODE).is_file() or not any(any(path.glob(pattern)) for pattern in _FILES))


def _template_text(chat_template: str | Path) -> str:
    if isinstance(chat_template, str) and ("{" in chat_template or "\n" in chat_template):
        return chat_template
    if not Path(chat_template).is_file():
        raise DataError(f"chat_template {str(chat_template)!r} is neither Jinja text nor an existing file: give one of them")
    # A byte order mark would be part of every prompt.
    return Path(chat_template).read_text(encoding="utf-8-sig")


def encode(text: str, tokenizer: Any) -> list[int]:
    """The text's token ids, with only those special tokens that are in the text."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def decode(tokenizer: Any, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
    """The text of tokens as they are in the vocabulary, without cleaned-up spaces."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    return text


def conversation_tokens(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, *, add_generation_prompt: bool = False
) -> list[int]:
    """The token ids of messages with `role` and `content`.

    `add_generation_prompt` appends the header of an assistant turn (only with a chat template).

    Raises:
        DataError: The template cannot render the conversation, or a message has tool calls.
    """
    from jinja2.exceptions import TemplateError

    if any(message.get("tool_calls") for message in messages):
        raise DataError("a message has `tool_calls`, which only rollouts and training data support")
    if any(isinstance(message["content"], list) for message in messages):
        raise DataError("a message has an image, which only rollouts and training data support")
    plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    if not getattr(tokenizer, "chat_template", None):
        return list(chain.from_iterable(plain_pieces(plain, tokenizer)))
    try:
        text = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=add_generation_prompt)
    except (TemplateError, TypeError) as error:  # Jinja does not wrap errors raised by an expression of the template
        roles = [message["role"] for message in plain]
        raise DataError(f"the chat template cannot render messages of the roles {roles}: {error}") from error
    return encode(text, tokenizer)


def plain_pieces(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, *, add_bos: bool = True, add_eos: bool = True
) -> list[list[int]]:
    """The token ids of each message without a chat template: its content, without text between messages.

    The tokenizer's BOS token, if any, opens the first message with `add_bos`; its EOS token closes every assistant message with
    `add_eos`.
    """
    pieces = [encode(message["content"], tokenizer) for message in messages]
    if pieces and add_bos and tokenizer.bos_token_id is not None:
        pieces[0].insert(0, tokenizer.bos_token_id)
    for message, piece in zip(messages, pieces, strict=True):
        if message["role"] == "assistant" and add_eos and tokenizer.eos_token_id is not None:
            piece.append(tokenizer.eos_token_id)
    return pieces
