"""The model of the kit in plain torch: its folder, its optimizer steps, and the refits in which it sends its weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from rl_core.config.policy_sections import SCHEDULES, PolicyConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import RLCoreError, declined_transport
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import LossFunction, RefitManifest
from rl_core.interfaces.worker_context import WorkerContext
from rl_core.plugins.import_path import resolve
from rl_core.weights.adapters import LORA_A, LORA_B, LORA_SCALE, adapters_in, is_adapter
from rl_core.weights.fingerprint import Kind
from rl_core.weights.manifest import manifest_of
from rl_core.weights.source import WeightSource

Weights = Mapping[str, torch.Tensor]
"""Name in the checkpoint to tensor, float32."""

PAD, EOS, FIRST_BYTE = 0, 1, 2
VOCABULARY = 260
"""Padding, end of sequence, the 256 bytes, and two tokens that are never in a prompt."""
MAX_LENGTH = 256
_HIDDEN, _INNER, _LAYERS, _HEADS, _KEY_HEADS, _HEAD = 64, 96, 2, 2, 1, 32
_THETA, _EPSILON = 10000.0, 1e-5
_CLOSE = 1e-3
"""Difference of probabilities, or of log-probabilities, that rounding may turn around."""


class ReferenceModel(ABC):
    """A model in plain torch that backends are tested with; it has the vocabulary and the tokenizer of the kit.

    A backend whose model is not in Transformers defines its own, as `model` of its conformance class.

    Attributes:
        adapted: names in the checkpoint of the weights of linear layers, [out, in], that adapters are added to.
        buffers: names in the checkpoint of what is saved and sent, but never trained, such as frequencies of rotary positions.
    """

    adapted: ClassVar[Sequence[str]] = ()
    buffers: ClassVar[Collection[str]] = ()

    @abstractmethod
    def make_weights(self) -> dict[str, torch.Tensor]:
        """Random weights, float32, under the names of the checkpoint.

        They should be wide enough that log-probabilities differ by whole nats, so that errors are visible, and that some rows
        end by themselves and others at a limit of 12 tokens: multiply the head's row of `EOS`.
        """

    @abstractmethod
    def save_weights(self, folder: Path, weights: Weights) -> None:
        """Write what the backend loads as `model_name`, apart from the tokenizer's files."""

    @abstractmethod
    def logits(self, weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
        """[T, V] float32, differentiable in the weights: row t is that of token t + 1 after `tokens[: t + 1]`, [T] int64."""

    def save(self, folder: Path, weights: Weights) -> str:
        """Write weights and tokenizer; returns the folder as text."""
        folder.mkdir(parents=True, exist_ok=True)
        self.save_weights(folder, weights)
        byte_tokenizer().save_pretrained(folder)
        return str(folder)

    def log_distributions(
        self, weights: Weights, tokens: torch.Tensor, *, temperature: float = 1.0, images: Any = None
    ) -> torch.Tensor:
        """Log-probabilities of all tokens after each prefix of a row.

        Args:
            weights: the weights.
            tokens: [T] int64.
            temperature: divides the logits.
            images: of the row, if it has some.

        Returns:
            [T, V] float32, in nats; position t is the distribution of token t + 1.
        """
        logits = self.logits(weights, tokens, images) if images else self.logits(weights, tokens)  # type: ignore[call-arg]
        return (logits / temperature).log_softmax(dim=-1)

    def logprobs(
        self,
        weights: Weights,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        *,
        temperature: float = 1.0,
        used: int | None = None,
        images: Any = None,
        **limits: Any,
    ) -> torch.Tensor:
        """[B, T] float32 log-probability of each token given those before it; 0.0 for the first and on padding.

        Tokens from the id `used` on have probability 0. `images` is that column, `limits` those of `limited`.
        """
        rows = []
        for tokens, length, shown in zip(ids, lengths.tolist(), images or [None] * len(ids), strict=True):
            distributions = self.log_distributions(weights, tokens[: length - 1], temperature=temperature, images=shown)
            distributions = distributions[:, :used].log_softmax(dim=-1)
            if limits:
                distributions = limited(distributions, **limits)
            of_tokens = distributions.gather(1, tokens[1:length, None])[:, 0]
            rows.append(torch.nn.functional.pad(of_tokens, (1, len(tokens) - length)))
        return torch.stack(rows)

    def greedy_completion(self, weights: Weights, prompt: torch.Tensor, *, limit: int) -> torch.Tensor:
        """The most likely token at each position, until the end token, which is included, or the limit."""
        tokens = prompt
        for _ in range(limit):
            following = self.log_distributions(weights, tokens)[-1].argmax()
            tokens = torch.cat([tokens, following.view(1)])
            if int(following) == EOS:
                break
        return tokens[len(prompt) :]


class Llama(ReferenceModel):
    """A Llama of 90,000 parameters, in the format of Transformers.

    It is written from the definition of the architecture (https://arxiv.org/abs/2302.13971, grouped queries of
    https://arxiv.org/abs/2305.13245), one row at a time, and shares no code with any backend. `dropout` is that of attention in
    its config, which the reference never applies.
    """

    adapted = tuple(
        f"model.layers.{layer}.{name}.weight"
        for layer in range(_LAYERS)
        for name in (*(f"self_attn.{part}_proj" for part in "qkvo"), *(f"mlp.{part}_proj" for part in ("gate", "up", "down")))
    )

    def __init__(self, *, dropout: float = 0.0) -> None:
        self._dropout = dropout

    def make_weights(self, *, seed: int = 3) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int, width: float = 0.15) -> torch.Tensor:
            return torch.randn(shape, generator=generator) * width

        weights = {"model.embed_tokens.weight": drawn(VOCABULARY, _HIDDEN, width=1.0)}
        for layer in range(_LAYERS):
            name = f"model.layers.{layer}."
            weights[f"{name}input_layernorm.weight"] = 1.0 + drawn(_HIDDEN)
            weights[f"{name}self_attn.q_proj.weight"] = drawn(_HEADS * _HEAD, _HIDDEN)
            weights[f"{name}self_attn.k_proj.weight"] = drawn(_KEY_HEADS * _HEAD, _HIDDEN)
            weights[f"{name}self_attn.v_proj.weight"] = drawn(_KEY_HEADS * _HEAD, _HIDDEN)
            weights[f"{name}self_attn.o_proj.weight"] = drawn(_HIDDEN, _HEADS * _HEAD)
            weights[f"{name}post_attention_layernorm.weight"] = 1.0 + drawn(_HIDDEN)
            weights[f"{name}mlp.gate_proj.weight"] = drawn(_INNER, _HIDDEN)
            weights[f"{name}mlp.up_proj.weight"] = drawn(_INNER, _HIDDEN)
            weights[f"{name}mlp.down_proj.weight"] = drawn(_HIDDEN, _INNER)
        weights["model.norm.weight"] = 1.0 + drawn(_HIDDEN)
        weights["lm_head.weight"] = drawn(VOCABULARY, _HIDDEN, width=0.2)
        # Some rows end by themselves, others at a limit.
        weights["lm_head.weight"][EOS] *= 2.5
        return weights

    def save_weights(self, folder: Path, weights: Weights) -> None:
        save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
        sizes = {"vocab_size": VOCABULARY, "hidden_size": _HIDDEN, "intermediate_size": _INNER, "num_hidden_layers": _LAYERS}
        heads = {"num_attention_heads": _HEADS, "num_key_value_heads": _KEY_HEADS, "head_dim": _HEAD, "rope_theta": _THETA}
        ids = {"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": PAD, "tie_word_embeddings": False}
        other = {"max_position_embeddings": MAX_LENGTH, "rms_norm_eps": _EPSILON, "attention_dropout": self._dropout}
        kind = {"architectures": ["LlamaForCausalLM"], "dtype": "float32"}
        LlamaConfig(**sizes, **heads, **ids, **other, **kind).save_pretrained(folder)

    def logits(self, weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
        hidden = weights["model.embed_tokens.weight"][tokens]
        length = len(tokens)
        future = torch.triu(torch.full((length, length), -torch.inf), diagonal=1)
        for layer in range(_LAYERS):
            name = f"model.layers.{layer}."
            normed = _normed(hidden, weights[f"{name}input_layernorm.weight"])
            queries = _rotated((normed @ weights[f"{name}self_attn.q_proj.weight"].T).view(length, _HEADS, _HEAD))
            keys = _rotated((normed @ weights[f"{name}self_attn.k_proj.weight"].T).view(length, _KEY_HEADS, _HEAD))
            values = (normed @ weights[f"{name}self_attn.v_proj.weight"].T).view(length, _KEY_HEADS, _HEAD)
            keys, values = (each.repeat_interleave(_HEADS // _KEY_HEADS, dim=1) for each in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", queries, keys) / math.sqrt(_HEAD) + future
            mixed = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values).reshape(length, _HEADS * _HEAD)
            hidden = hidden + mixed @ weights[f"{name}self_attn.o_proj.weight"].T
            normed = _normed(hidden, weights[f"{name}post_attention_layernorm.weight"])
            gate = torch.nn.functional.silu(normed @ weights[f"{name}mlp.gate_proj.weight"].T)
            inner = gate * (normed @ weights[f"{name}mlp.up_proj.weight"].T)
            hidden = hidden + inner @ weights[f"{name}mlp.down_proj.weight"].T
        return _normed(hidden, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def limited(distributions: torch.Tensor, *, top_k: int | None = None, top_p: float = 1.0) -> torch.Tensor:
    """The distributions among the `top_k` most likely tokens, and of these the fewest with a total probability of `top_p`.

    Args:
        distributions: [T, V] log-probabilities, in nats.
        top_k: None for all tokens.
        top_p: 1.0 for all tokens.

    Returns:
        [T, V] float32, in nats: -inf for tokens that are not kept; NaN at positions where rounding decides what is kept.
    """
    likely, order = distributions.double().sort(dim=-1, descending=True)
    number = top_k or likely.shape[1]
    kept = likely[:, :number].log_softmax(dim=-1)
    before = kept.exp().cumsum(dim=-1) - kept.exp()
    close = ((before - top_p).abs() < _CLOSE).any(dim=-1)
    if number < likely.shape[1]:
        close |= likely[:, number - 1] - likely[:, number] < _CLOSE
    kept = kept.masked_fill(before >= top_p, -torch.inf).log_softmax(dim=-1).masked_fill(close[:, None], torch.nan)
    whole = torch.full_like(likely, -torch.inf).masked_fill(close[:, None], torch.nan)
    return whole.scatter(-1, order[:, :number], kept).float()


def byte_tokenizer() -> Any:
    """The tokenizer of the model: the 94 visible characters of ASCII are the tokens from `FIRST_BYTE`."""
    names = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "<unused0>", "<unused1>"]
    core = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, special=True) for name in ("<pad>", "<eos>")])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")


@contextmanager
def one_thread() -> Iterator[None]:
    """A block in which this process computes with one thread: in a model this small, several would wait for each other."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(number)


def _normed(hidden: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return hidden * (hidden.square().mean(dim=-1, keepdim=True) + _EPSILON).rsqrt() * scale


def _rotated(heads: torch.Tensor) -> torch.Tensor:
    """Rotary positions: pairs (i, i + D/2) of each head are rotated by the position times theta^(-2i/D)."""
    half = _HEAD // 2
    angles = torch.arange(len(heads))[:, None] * _THETA ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class ReferenceSender(WeightSource):
    """The sending half of a refit.

    Args:
        weights: the weights of version 0.
        folder: for weights sent as files.
    """

    def __init__(self, weights: Weights, folder: Path) -> None:
        self.context = WorkerContext(
            rank=0, world_size=1, local_rank=0, node_rank=0, master_address="127.0.0.1", master_port=0, run_in_process=True
        )
        self.weights, self._version, self._folder = dict(weights), 0, folder
        self.received: Weights = self.weights
        """What the engine computes with after the last complete refit, adapters merged."""
        self._frozen_are_held = False

    def iter_weights(self, names: Sequence[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, self.weights[name]) for name in (names if names is not None else self.weights))

    def weight_manifest(self) -> RefitManifest:
        return manifest_of(self.weights)

    def get_weight_version(self) -> int:
        return self._version

    def adapt(self, names: Sequence[str], *, rank: int) -> None:
        """Add random adapters to the layers of these weights, which are frozen from now on."""
        generator = torch.Generator().manual_seed(0)
        for name in names:
            (out, size), layer = self.weights[name].shape, name.removesuffix(".weight")
            self.weights[layer + LORA_A] = 0.1 * torch.randn(rank, size, generator=generator)
            self.weights[layer + LORA_B] = 0.1 * torch.randn(out, rank, generator=generator)
            self.weights[layer + LORA_SCALE] = 0.5 + torch.rand((), generator=generator)
        self._frozen_are_held = False

    def train(self, *, seed: int) -> None:
        """Replace every weight that is not frozen, as an optimizer step does; the version increases by one."""
        generator, manifest = torch.Generator().manual_seed(seed), self.weight_manifest()
        trained = adapters_in(manifest) or manifest
        changes = {name: 0.05 * torch.randn(shape, generator=generator) for name, (shape, _) in trained.items()}
        self.weights = {**self.weights, **{name: self.weights[name] + change for name, change in changes.items()}}
        self._version += 1

    def refit(self, engine: GenerationInterface, capabilities: Collection[str], *, leave_out: int = 0) -> None:
        """Send the weights with a primitive that the engine declares, or with another one if it declines that.

        Args:
            engine: the receiver.
            capabilities: of the engine.
            leave_out: number of tensors at the end that are not sent.
        """
        try:
            self._send(engine, capabilities, leave_out)
        except RLCoreError as error:
            if "by_reference" not in capabilities or declined_transport(error) is None:
                raise
            self._send(engine, {*capabilities} - {"by_reference"}, leave_out)

    def _send(self, engine: GenerationInterface, capabilities: Collection[str], leave_out: int) -> None:
        manifest: RefitManifest = self.prepare_refit_info()
        if self._frozen_are_held and engine.weight_version >= 0:
            manifest = adapters_in(manifest) or manifest
        self._frozen_are_held = False
        self.prepare_weights_for_ipc(receiver_dtypes=engine.prepare_refit_info(manifest) or {})
        names = list(manifest)
        try:
            for number, bucket in enumerate([names[:5], names[5 : len(names) - leave_out]]):
                engine.update_weights(
                    self.get_weights_ipc_handles(bucket, **transfer(capabilities, self._folder / f"{number}.safetensors"))
                )
        finally:
            self.finish_refit()
        self.received, self._frozen_are_held = merged(self.weights), not leave_out

    def fingerprint(self, engine: GenerationInterface) -> str:
        """The fingerprint of the weights as the engine stores them, in the kind of the engine's."""
        digests = engine.weight_digests()
        dtypes = {name: digest.partition("[")[0] for name, digest in digests.items() if name in self.weights}
        kind: Kind = "wsum" if engine.weight_fingerprint().startswith("wsum") else "xxh3"
        return self.weight_fingerprint(dtypes=dtypes, kind=kind)


def merged(weights: Weights) -> Weights:
    """The weights with their adapters added, W + s B A."""
    whole = {name: tensor for name, tensor in weights.items() if not is_adapter(name)}
    for layer in (name.removesuffix(LORA_SCALE) for name in weights if name.endswith(LORA_SCALE)):
        added = weights[layer + LORA_SCALE] * (weights[layer + LORA_B] @ weights[layer + LORA_A])
        whole[f"{layer}.weight"] = whole[f"{layer}.weight"] + added
    return whole


def transfer(capabilities: Collection[str], file: Path) -> Mapping[str, Any]:
    """Arguments of `get_weights_ipc_handles` for a primitive that both ends declare; `file` is for weights sent as files."""
    if "by_reference" in capabilities:
        return {"by_reference": True}
    if "shared_memory" in capabilities:
        return {}
    return {"file": str(file)}


class ReferenceTrainer:
    """Trains the reference model: one pass for all rows of a step, with gradients by autograd.

    Args:
        model: the model.
        weights: of version 0.
        section: the policy's, for optimizer, schedule, temperature and clipping.
    """

    def __init__(self, model: ReferenceModel, weights: Weights, section: PolicyConfig) -> None:
        self.model = model
        self.weights = {name: tensor.clone().requires_grad_(name not in model.buffers) for name, tensor in weights.items()}
        self.trained = [weight for weight in self.weights.values() if weight.requires_grad]
        self.version = 0
        self._section = section
        factory: Any = resolve(section.optimizer.name, key="policy.optimizer.name")
        self._optimizer = factory(self.trained, **section.optimizer.kwargs)
        self._lr = self._optimizer.param_groups[0]["lr"]

    def logprobs(self, rows: BatchedDataDict[Any]) -> torch.Tensor:
        """[B, T] float32 at the scoring temperature, in nats; 0.0 at position 0 and on padding."""
        shown, of_rows = rows.get("images"), (rows["input_ids"], rows["input_lengths"])
        return self.model.logprobs(self.weights, *of_rows, temperature=self._section.scoring_temperature, images=shown)

    def outcome(self, rows: BatchedDataDict[Any], loss_fn: LossFunction) -> dict[str, float]:
        """What a step should report, without taking it; `grad_norm` is before clipping. The gradients stay in the weights."""
        self._optimizer.zero_grad()
        seqs, toks = rows["sample_mask"].sum(), (rows["token_mask"] * rows["sample_mask"].unsqueeze(1)).sum()
        loss, metrics = loss_fn(self.logprobs(rows), rows, seqs, toks)
        loss.backward()
        norm = torch.stack([weight.grad.norm() for weight in self.trained if weight.grad is not None]).norm()
        numbers = {"loss": loss.detach(), "grad_norm": norm, "global_valid_seqs": seqs, "global_valid_toks": toks, **metrics}
        return {name: float(value) for name, value in numbers.items()}

    def train(self, rows: BatchedDataDict[Any], loss_fn: LossFunction) -> dict[str, float]:
        """Take one step."""
        expected = self.outcome(rows, loss_fn)
        if (schedule := self._section.scheduler) is not None:
            self._optimizer.param_groups[0]["lr"] = self._lr * SCHEDULES[schedule.name](self.version, **schedule.kwargs)
        if self._section.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.trained, self._section.max_grad_norm)
        self._optimizer.step()
        self.version += 1
        return {**expected, "lr": self._optimizer.param_groups[0]["lr"]}
