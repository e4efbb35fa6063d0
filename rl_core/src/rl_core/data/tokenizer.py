"""Loading a tokenizer that is fit to batch with; knows Transformers' tokenizers, no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_core.errors import DataError

_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken*")


def load_tokenizer(
    name_or_path: str | Path, *, chat_template: str | Path | None = None, trust_remote_code: bool = False
) -> Any:
    """A Transformers tokenizer that pads on the right and has a padding token.

    A tokenizer without a padding token pads with its EOS token: what lies in the padding is never read, since lengths and
    masks travel with every batch.

    Args:
        name_or_path: A model's name, a folder, or a GGUF file.
        chat_template: Replaces the tokenizer's own: the Jinja text, or the path of a file that holds it.
        trust_remote_code: Whether code that comes with the tokenizer may run.

    Raises:
        DataError: There is no such tokenizer, or it has neither a padding nor an EOS token.
    """
    from transformers import AutoTokenizer

    path = Path(name_or_path)
    try:
        if path.suffix == ".gguf":
            tokenizer = AutoTokenizer.from_pretrained(
                str(path.parent), gguf_file=path.name, trust_remote_code=trust_remote_code
            )
        else:
            tokenizer = AutoTokenizer.from_pretrained(str(name_or_path), trust_remote_code=trust_remote_code)
    except ImportError as error:
        raise DataError(f"reading {str(name_or_path)!r} needs a package that is not here: {error}") from error
    except (OSError, ValueError) as error:
        raise DataError(
            f"no tokenizer could be read from {str(name_or_path)!r}: {str(error).rstrip('.')}. Give a model's name, a "
            "folder with its tokenizer files, or a .gguf file"
        ) from error
    if chat_template is not None:
        tokenizer.chat_template = _template_text(chat_template)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise DataError(f"the tokenizer of {str(name_or_path)!r} has neither a padding nor an EOS token: add one")
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer


def load_tokenizer_if_there(
    model_name: str | Path,
    *,
    tokenizer_name: str | None = None,
    chat_template: str | Path | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """The tokenizer that is named, or the model's; None where the model's folder has none and no other is named.

    Args:
        model_name: A model's name, a folder, or a GGUF file.
        tokenizer_name: Likewise, of another tokenizer.
        chat_template: As `load_tokenizer`.
        trust_remote_code: As `load_tokenizer`.

    Raises:
        DataError: There should be one, and it cannot be loaded.
    """
    folder = Path(model_name).expanduser()
    # Asked for a tokenizer that is not there, Transformers may make an empty one.
    if tokenizer_name is None and folder.is_dir() and not any(path for pattern in _FILES for path in folder.glob(pattern)):
        return None
    return load_tokenizer(tokenizer_name or model_name, chat_template=chat_template, trust_remote_code=trust_remote_code)


def _template_text(chat_template: str | Path) -> str:
    is_path = isinstance(chat_template, Path) or not ("{" in chat_template or "\n" in chat_template)
    if not is_path:
        return str(chat_template)
    if not Path(chat_template).is_file():
        raise DataError(f"chat_template {str(chat_template)!r} is neither a Jinja text nor a file that exists")
    # A byte order mark would stand at the beginning of every prompt.
    return Path(chat_template).read_text(encoding="utf-8-sig")
