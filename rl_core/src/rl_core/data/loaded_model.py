"""Compares a saved model with what a section requests, what its class needs, and what Transformers loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

from safetensors import SafetensorError, safe_open

from rl_core.data.hub import pretrained_location, published_file
from rl_core.errors import UserError

Head = Literal["tokens", "scalar"]
"""`policy.head`."""

CLASSIFIER: Final = "ForSequenceClassification"
"""Suffix of Transformers' classes with a head for sequence scores."""
_log = logging.getLogger("rlcore")
_FILES: Final = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_LISTED: Final = 6


def refuse_other_head(config: Any, head: Head, *, name: str) -> None:
    """Check that a saved model, by its Hugging Face config, supports this head; a causal LM supports both.

    Raises:
        UserError: it was saved with another head.
    """
    classifier = next((name for name in getattr(config, "architectures", None) or () if name.endswith(CLASSIFIER)), None)
    if classifier is None:
        return
    if head == "tokens":
        raise UserError(
            f"{name} is a {classifier}, which scores whole sequences and does not predict tokens. It can be a value or "
            "reward model (`head: scalar`); a policy must be a causal LM.",
            key="head",
        )
    if config.num_labels != 1:
        raise UserError(
            f"{name} is a {classifier} with {config.num_labels} labels, but a scalar head has one. Use a reward or value model "
            "(`num_labels` 1), or a causal LM, which gets a new head."
        )


def check_loaded(model: Any, report: Mapping[str, Any], *, name: str, error: type[UserError] = UserError) -> None:
    """Raise `error` if a model's tensors are not those of its files; warn about tensors that it does not use.

    The head of a classifier may be missing if the files are those of a causal LM.

    Args:
        model: as Transformers loaded it, on any device.
        report: its `output_loading_info`, with `ignore_mismatched_sizes`.
        name: its name or folder.
        error: class of the error.
    """
    layers = {key for key, module in model.named_modules() if next(module.parameters(recurse=False), None) is not None}
    missing, unused = set(report["missing_keys"]), set(report["unexpected_keys"])
    if type(model).__name__.endswith(CLASSIFIER) and CLASSIFIER not in " ".join(model.config.architectures or ()):
        missing.discard("score.weight")
        unused = {key for key in unused if key.startswith(f"{model.base_model_prefix}.")}  # not the LM head
    of_layers = [key for key in unused if key.rpartition(".")[0] in layers]
    wrong = [(key, "unused, although the model has other tensors of this layer") for key in of_layers]
    for key, stored, needed in report["mismatched_keys"]:
        wrong.append((key, f"has shape {tuple(stored)}, but the model needs {tuple(needed)}"))
    tied = model.get_expanded_tied_weights_keys(all_submodels=True).items()
    on_meta = model.device.type == "meta"
    untied = {pair for pair in tied if _differ(name, *pair)} if on_meta else tied - model.all_tied_weights_keys.items()
    wrong += [(key, f"differs from {other}, although `tie_word_embeddings` is true") for key, other in untied]
    wrong += [(key, "missing") for key in missing]
    if wrong:
        raise _error(name, wrong, error)
    if unused:
        text = "%s has %d tensors that a %s does not use, such as %s. They are neither trained nor saved."
        _log.warning(text, name, len(unused), type(model).__name__, min(unused))


def check_files(name: str, *, head: Head | None = None, error: type[UserError] = UserError, **arguments: Any) -> None:
    """As `check_loaded`, before a model is loaded: reads only the headers of its files, and tied tensors that are stored twice.

    Models with their own code or quantized weights are not compared: that would run the code, or needs another library.

    Args:
        name: name or folder.
        head: head type; by default that of the class that the config names.
        error: class of the error.
        **arguments: of `from_pretrained`; others replace fields of the config.
    """
    import transformers
    from transformers.models.auto import modeling_auto as auto

    location, options = pretrained_location(name)
    config, _ = transformers.PretrainedConfig.get_config_dict(location, **options)
    kind, model_class = config.get("model_type"), None
    if head is None:
        model_class = getattr(transformers, str((config.get("architectures") or [None])[0]), None)
    if head == "scalar" and kind in auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        model_class, arguments["num_labels"] = transformers.AutoModelForSequenceClassification, 1
    elif head != "scalar" and kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        model_class = model_class or transformers.AutoModelForCausalLM
    elif head != "scalar" and kind in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        model_class = model_class or transformers.AutoModelForImageTextToText
    if model_class is None or "auto_map" in config or "quantization_config" in config:
        return
    arguments |= {"device_map": "meta", "ignore_mismatched_sizes": True, "output_loading_info": True}
    with report_as_error(name, error):
        model, report = model_class.from_pretrained(location, **options, **arguments)
    check_loaded(model, report, name=name, error=error)


@contextmanager
def report_as_error(name: str, error: type[UserError] = UserError) -> Iterator[None]:
    """Hide Transformers' own report of tensors, which `check_loaded` replaces, and raise `error` for files that cannot be read.

    Only this report, in its log, names tensors that could not be joined, such as those of experts.
    """
    unjoined: set[str] = set()

    def is_shown(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        unjoined.update(line.split()[0] for line in text.splitlines() if "CONVERSION" in line and "|" in line)
        return "LOAD REPORT" not in text and "tied weights mapping" not in text

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(is_shown)
    try:
        yield
    except SafetensorError as failure:
        raise error(f"A file of {name} is incomplete or corrupt: {failure}. Restore it from a copy.") from failure
    except RuntimeError as failure:
        if not unjoined:
            raise
        text = "tensors that are joined to it are missing or have unequal shapes"
        raise _error(name, [(key, text) for key in unjoined], error) from failure
    finally:
        logger.removeFilter(is_shown)


def exact_attention(config: Any, model_class: Any = None) -> str:
    """The fastest attention that computes what a config describes: SDPA ignores a cap of attention logits."""
    is_capped = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None
    return "eager" if is_capped or not getattr(model_class, "_supports_sdpa", True) else "sdpa"


def weights_file(name: str) -> Path | None:
    """The weights of a local folder, or their index; None if there are none, or `name` is not a folder."""
    return next((path for each in _FILES if (path := Path(name).expanduser() / each).is_file()), None)


def _differ(name: str, one: str, other: str) -> bool:
    """Whether the safetensors files of a model have two tensors that differ."""
    stored: dict[str, Any] = {}
    config = published_file(name, "config.json")
    for path in config.parent.glob("*.safetensors") if config else ():
        with safe_open(path, framework="pt") as file:
            stored |= {key: file.get_tensor(key) for key in {one, other}.intersection(file.keys())}
    return len(stored) == 2 and not stored[one].equal(stored[other])


def _error(name: str, wrong: list[tuple[str, str]], error: type[UserError]) -> UserError:
    lines = [f"\n  {key}: {problem}" for key, problem in sorted(wrong)]
    more = f"\n  and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
    return error(
        f"The tensors of {weights_file(name) or name} are not those of its config.json:{''.join(lines[:_LISTED])}{more}\n"
        "Missing tensors would be initialized randomly. Restore the files from a complete copy; or correct config.json if it "
        "describes another model (such as `tie_word_embeddings`, `vocab_size`, `num_hidden_layers` or `attention_bias`)."
    )
