"""The path that vLLM loads a model from: its own folder or name, or, for a GGUF file, a folder with its configuration only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rl_backends_vllm.sources import IMAGE_FAMILIES
from rl_core.config.policy_sections import TokenizerConfig
from rl_core.data.adapted_tokenizer import AdaptedTokenizer
from rl_core.data.hub import model_source, read_model_config
from rl_core.data.tokenizer import find_tokenizer
from rl_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """Files and configuration of a model.

    Attributes:
        path: model path or hub name for vLLM.
        revision: of that name; None for a path, or for the main branch.
        hf_config: the Transformers configuration.
        generation_config: the generation configuration, or None if the model has none.
        tokenizer: of the model or the config, or None if there is none.
        tokenizer_path: tokenizer path for vLLM; None if there is none, or Transformers cannot load it.
        has_weights: whether `path` contains weights.
    """

    path: str
    revision: str | None
    hf_config: Any
    generation_config: Any
    tokenizer: Any
    tokenizer_path: str | None
    has_weights: bool


@contextmanager
def model_files(
    model_name: str, *, tokenizer_name: str | None, trust_remote_code: bool, temp_dir: Path
) -> Iterator[ModelFiles]:
    """Yield the files of a model. They exist while the block runs; vLLM needs them only while it starts.

    Args:
        model_name: folder, name on a hub, or GGUF file.
        tokenizer_name: of a tokenizer other than the model's.
        trust_remote_code: whether code that comes with the model is run.
        temp_dir: folder for generated files.

    Raises:
        ConfigError: the model does not exist or cannot be read.
    """
    is_gguf = Path(model_name).suffix == ".gguf"
    source, revision = model_source(model_name)
    hf_config = read_config(model_name, trust_remote_code=trust_remote_code)
    if is_gguf:
        _refuse_rope_scaling(Path(model_name).expanduser())
    tokenizer = find_tokenizer(model_name, TokenizerConfig(name=tokenizer_name), trust_remote_code=trust_remote_code)
    readable = None if isinstance(tokenizer, AdaptedTokenizer) else tokenizer
    # vLLM would read a tokenizer that `find_tokenizer` has corrected as it is in its folder.
    writes_tokenizer = readable is not None and (is_gguf or tokenizer_name is not None or readable.is_corrected)
    with TemporaryDirectory(dir=temp_dir) as folder:
        if is_gguf:
            hf_config.save_pretrained(folder)
        if writes_tokenizer:
            tokenizer.save_pretrained(folder)
        yield ModelFiles(
            path=folder if is_gguf else source,
            revision=revision,
            hf_config=hf_config,
            generation_config=_generation_config(source, revision) if not is_gguf else None,
            tokenizer=tokenizer,
            tokenizer_path=None if readable is None else folder if writes_tokenizer else source,
            has_weights=not is_gguf,
        )


def read_config(model_name: str, *, trust_remote_code: bool) -> Any:
    """The Transformers configuration of a model.

    Args:
        model_name: folder, name on a hub, or GGUF file.
        trust_remote_code: whether code that comes with the model is run.

    Raises:
        ConfigError: the model does not exist or cannot be read.
    """
    try:
        return read_model_config(model_name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"policy.generation.model_name: cannot read {model_name!r} as a model: {error}") from error


def auto_class(hf_config: Any) -> Any:
    """The class of Transformers that creates the model of a configuration."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if hf_config.model_type in IMAGE_FAMILIES else AutoModelForCausalLM


def _refuse_rope_scaling(file: Path) -> None:
    from transformers.integrations.gguf import read_gguf_metadata

    metadata, tensors = read_gguf_metadata(str(file))
    scaled = [key for key, value in metadata.items() if key.endswith(".rope.scaling.factor") and value not in (0.0, 1.0)]
    scaled += [f"the tensor {name}" for name in tensors if name.startswith("rope_")]
    if scaled:
        raise ConfigError(
            f"policy.generation: {file} has rope scaling ({scaled[0]}), which vLLM would ignore. Use the folder of "
            "the model that the file was made from, or `policy.generation.backend: hf`."
        )


def _generation_config(source: str, revision: str | None) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(source, revision=revision or "main")
    except OSError:  # optional
        return None
