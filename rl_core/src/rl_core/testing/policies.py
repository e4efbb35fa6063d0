"""Conformance of policies, compared with a reference of the kit that takes the same steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from rl_core.config.schema import DeadlineConfig, OptimizerConfig, PolicyConfig, SchedulerConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import CheckpointError, NonFiniteError
from rl_core.interfaces.policy import ColocatablePolicyInterface, LossFunction, PolicyInterface
from rl_core.interfaces.worker import PolicyFacts
from rl_core.plugins.component import Kind
from rl_core.testing import images
from rl_core.testing.comparisons import check_facts, check_logprobs, check_unchanged, section_of
from rl_core.testing.outputs.models import NanGradientLoss, scored
from rl_core.testing.promises import Condition, Conformance, Found, creation, declares, must_raise, optional, promise
from rl_core.testing.reference import FIRST_BYTE, VOCABULARY, Llama, ReferenceModel, ReferenceTrainer, one_thread, transfer
from rl_core.weights import fingerprint
from rl_core.weights.cuda_ipc import open_handles
from rl_core.weights.manifest import manifest_of

TEMPERATURE = 0.7
_TOP = 5
_CLIPPED = 0.2
"""Largest gradient norm, below that of every step, so that each is clipped; `grad_norm` is the norm before."""
_RELATIVE = 1e-3
"""Largest relative difference of a loss, metric or gradient norm; float32 sums in another order differ by about 1e-6."""
_SMALL_STEPS = 6
"""Each of them is lost for nearly all weights if it is added to bfloat16."""
_BUFFER = 100_000
"""Bytes of weights in transit: the model needs several buckets."""
_SCORES, _LOSS, _EVALUATION, _GRADIENT, _STEP, _VERSION, _CONTINUED, _SENT = (
    "test_log_probabilities_equal_the_reference",
    "test_loss_and_metrics_equal_the_reference",
    "test_evaluation_takes_no_step",
    "test_the_gradient_equals_the_reference",
    "test_a_step_moves_the_weights_as_that_of_the_reference",
    "test_the_version_counts_optimizer_steps",
    "test_training_continues_from_a_checkpoint",
    "test_sent_weights_are_the_trained_weights",
)


@dataclass
class _Subject:
    """A policy, and the reference that takes the same steps."""

    policy: PolicyInterface
    reference: ReferenceTrainer

    def shutdown(self) -> None:
        self.policy.shutdown()


_PACKED = {"sequence_packing", "dynamic_batching"}
_PACKING = Condition(
    text="neither `sequence_packing` nor `dynamic_batching` is declared",
    holds=lambda tests: bool(_PACKED & tests.capabilities()),
)
_SENDING = Condition(
    text="none of `by_reference`, `shared_memory` and `disk` is declared",
    holds=lambda tests: bool({"by_reference", "shared_memory", "disk"} & tests.capabilities()),
)


class PolicyConformance(Conformance[_Subject]):
    """Promises of policies.

    Attributes:
        tolerance: largest difference of a log-probability from the reference, in nats; for float32.
        model: the model that it is tested with; a policy of a model that is not in Transformers defines its own.
        picture_model: the model that rows with images are tested with.
    """

    kind = Kind.POLICY
    minimum = 17
    created_again = True
    tolerance: ClassVar[float] = 1e-3
    model: ClassVar[ReferenceModel] = Llama(dropout=0.1)
    picture_model: ClassVar[images.PictureModel | None] = None

    @classmethod
    def section(cls) -> PolicyConfig:
        """The policy's section: the model of the kit in float32, and an optimizer whose state matters."""
        values: dict[str, Any] = {
            "backend": cls.component,
            "model_name": str(cls._folder / "model"),
            "precision": "float32",
            "max_total_sequence_length": 64,
            "train_micro_batch_size": 2 * NUM_ROWS,
            "logprob_batch_size": 3,
            "max_grad_norm": _CLIPPED,
            "optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.5, "momentum": 0.9}},
            "generation": {"backend": "reference", "temperature": TEMPERATURE},
        }
        return section_of(cls.registered(), PolicyConfig, {**values, **cls.config})

    @classmethod
    def create(cls) -> _Subject:
        weights = cls.model.make_weights()
        cls.model.save(cls._folder / "model", weights)
        section = cls.with_settings(cls.section())
        cls._exits.enter_context(one_thread())
        policy = cls.registered().load()(config=section, cluster=cls.cluster(), deadlines=DeadlineConfig(), name="policy")
        if not isinstance(policy, PolicyInterface):
            raise Found(f"{type(policy).__name__} is not a subclass of rl_core.interfaces.PolicyInterface.")
        cls._exits.callback(policy.shutdown)
        policy.prepare_for_training()
        return _Subject(policy, ReferenceTrainer(cls.model, weights, section))

    test_it_is_created_from_its_section = creation(
        "It is created with `config`, `cluster`, `deadlines` and `name`, and loads a folder in the format of Transformers."
    )

    @promise(
        "It returns the required facts of `PolicyFacts` when it has loaded, each with its type and its value for the model."
    )
    def test_facts_are_those_of_the_model(self) -> str:
        size = sum(weight.numel() for weight in self._reference.trained)
        return check_facts(self._policy, PolicyFacts, vocab_size=VOCABULARY, num_parameters=size)

    @promise("`get_logprobs` returns the log-probability of each token at the sampling temperature, and 0.0 on padding.")
    def test_log_probabilities_equal_the_reference(self) -> str:
        self._check_weights(f"at temperature {TEMPERATURE}", seed=1)
        return self._check_weights(f"at temperature {TEMPERATURE}", seed=2)

    @promise(
        "`get_topk_logprobs` returns the most likely tokens of each position, in descending order.",
        applies=declares("topk_logprobs"),
        after=_SCORES,
    )
    def test_top_log_probabilities_equal_the_reference(self) -> None:
        rows = make_rows(seed=1)
        scores = scored(self._policy.get_topk_logprobs, _scoring(rows), _TOP)["topk_logprobs"]
        for row, (tokens, length) in enumerate(zip(rows["input_ids"], rows["input_lengths"].tolist(), strict=True)):
            expected = self.model.log_distributions(self._reference.weights, tokens[: length - 1], temperature=TEMPERATURE)
            difference = float((scores[row, 1:length] - expected.topk(_TOP).values).abs().max().detach())
            if not difference <= self.tolerance:
                raise Found(f"the {_TOP} largest log-probabilities of row {row} differ by up to {difference:g} nats.")

    @promise("With `eval_mode`, `train` changes neither the weights nor their version.", after=_SCORES)
    def test_evaluation_takes_no_step(self) -> None:
        self._policy.train(make_rows(seed=4), KitLoss(), eval_mode=True)
        self._check_state("after an evaluation")

    @promise("`train` reports loss, metrics and counts of the whole batch, as the reference computes them.", after=_EVALUATION)
    def test_loss_and_metrics_equal_the_reference(self) -> str:
        rows = make_rows(seed=4)
        expected, returned = self._reference.outcome(rows, KitLoss()), self._policy.train(rows, KitLoss(), eval_mode=True)
        reported = {**returned, **returned.get("metrics", {})}
        for name in expected.keys() - {"grad_norm"}:
            _check_number(name, reported.get(name), expected[name])
        return f"loss {expected['loss']:.4f}"

    @promise("Scoring and training do not change the rows that they are passed.", after=_LOSS)
    def test_its_arguments_are_unchanged(self) -> None:
        check_unchanged("get_logprobs", self._policy.get_logprobs, make_rows(seed=3))
        check_unchanged("train", lambda rows: self._policy.train(rows, KitLoss(), eval_mode=True), make_rows(seed=3))

    @promise("The gradient norm that a step reports is that of the reference, before clipping.", after=_LOSS)
    def test_the_gradient_equals_the_reference(self) -> str:
        return f"norm {self._stepped(make_rows(seed=5)):.4f}"

    @promise(
        "A step clips the gradient at `max_grad_norm`, and moves the weights with the section's optimizer.", after=_GRADIENT
    )
    def test_a_step_moves_the_weights_as_that_of_the_reference(self) -> str:
        for seed in (6, 7):
            self._stepped(make_rows(seed=seed))
            found = self._check_weights("after a step")
        return found

    @promise(
        "A gradient below `max_grad_norm` is not scaled: the step is that of the sum over all ranks and rows.", after=_STEP
    )
    def test_a_small_gradient_is_not_scaled(self) -> str:
        rows = make_rows(seed=19)
        limit = self.section().max_grad_norm or _CLIPPED
        rows["advantages"] *= 0.9 * limit / self._reference.outcome(rows, KitLoss())["grad_norm"]
        self._stepped(rows)
        return self._check_weights("after a step that was not clipped")

    @promise("The gradient is the same for every number of rows in a microbatch (`mbs`).", after=_STEP)
    def test_microbatches_do_not_change_the_gradient(self) -> None:
        for size in (1, 3):
            self._stepped(make_rows(seed=8), mbs=size)
            self._check_weights(f"after a step with microbatches of {size} rows")

    @promise("Rows with a `sample_mask` of 0 change neither the gradient nor its normalization.", after=_STEP)
    def test_filler_rows_do_not_change_the_gradient(self) -> None:
        rows = make_rows(seed=9)
        filler: BatchedDataDict[Any] = BatchedDataDict({**rows.slice(0, 3), "sample_mask": torch.zeros(3)})
        self._stepped(rows, passed=BatchedDataDict.from_batches([rows, filler]))
        self._check_weights("after a step with filler rows")

    @promise("`train` takes one optimizer step for every `gbs` rows, in their order.", after=_STEP)
    def test_a_call_takes_a_step_for_each_batch(self) -> None:
        rows, half = make_rows(seed=10), NUM_ROWS // 2
        returned = self._policy.train(rows, KitLoss(), gbs=half)
        for start in (0, half):
            self._reference.train(rows.slice(start, start + half), KitLoss())
        if returned.get("num_optimizer_steps") != 2:
            raise Found(f"`num_optimizer_steps` is {returned.get('num_optimizer_steps')} for {NUM_ROWS} rows and gbs={half}.")
        self._check_weights(f"after {NUM_ROWS} rows with gbs={half}")

    @promise("`weight_version` counts the optimizer steps behind the weights.", after=_STEP)
    def test_the_version_counts_optimizer_steps(self) -> str:
        self._stepped(make_rows(seed=11))
        return self._check_version("after a step")

    @promise("The reference policy keeps the initial weights while the policy is trained.", after=_STEP)
    def test_the_reference_policy_is_frozen(self) -> str:
        rows = make_rows(seed=13)
        with optional("the policy keeps no reference policy"):
            scores = scored(self._policy.get_reference_policy_logprobs, _scoring(rows))["reference_logprobs"]
        initial = ReferenceTrainer(self.model, self.model.make_weights(), self.section())
        return self._check_scores(scores, initial, rows, "of the reference policy")

    @promise(
        "After `load_checkpoint`, training continues as from the saved state: weights, optimizer and version.", after=_VERSION
    )
    def test_training_continues_from_a_checkpoint(self) -> None:
        paths = self._paths("checkpoint")
        self._policy.save_checkpoint(*paths)
        saved, first = copy.deepcopy(self._reference), self._continued()
        self._policy.load_checkpoint(*paths)
        self.subject().reference = saved
        self._check_state("after loading a checkpoint")
        again = self._continued()
        if not torch.equal(first, again):
            raise Found(
                f"the log-probabilities after two more steps differ by up to {float((first - again).abs().max()):g} nats from "
                "those of the same steps before loading. Save and load the optimizer's state."
            )

    @promise("`load_checkpoint` of a folder that does not exist is a `CheckpointError`.", after=_SCORES)
    def test_a_missing_checkpoint_is_refused(self) -> None:
        missing = self._folder / "missing"
        with must_raise(CheckpointError, otherwise=f"{missing} does not exist, and was loaded."):
            self._policy.load_checkpoint(missing / "weights", missing / "optimizer")

    @promise("It may be prepared, finished and offloaded twice, and its scores stay the same.", after=_STEP)
    def test_it_may_be_offloaded_twice(self) -> None:
        calls: list[Callable[[], Any]] = [self._policy.finish_training]
        if isinstance(self._policy, ColocatablePolicyInterface):
            calls += [self._policy.offload_before_refit, self._policy.offload_after_refit]
        for call in (*calls, self._policy.prepare_for_training):
            call()
            call()
        self._check_weights("after offloading")

    @promise(
        "The tensors that are sent in a refit are the trained weights, under their names in the checkpoint.",
        applies=_SENDING,
        after=_STEP,
    )
    def test_sent_weights_are_the_trained_weights(self) -> str:
        for seed in (14, 15):
            found = self._check_sent()
            self._stepped(make_rows(seed=seed))
        return found

    @promise("`weight_fingerprint` is that of the tensors that are sent.", applies=_SENDING, after=_SENT)
    def test_the_fingerprint_is_that_of_the_sent_weights(self) -> None:
        for _ in range(2):
            sent, found = self._sent(), self._sender.weight_fingerprint()
            kind: fingerprint.Kind = "wsum" if found.startswith("wsum") else "xxh3"
            expected = fingerprint.combine(fingerprint.tensor_digests(sent.items(), kind=kind), kind=kind)
            if found != expected:
                raise Found(f"the fingerprint is {found}, and that of the sent tensors {expected}.")
            self._stepped(make_rows(seed=14))

    @promise("A loss or gradient that is not finite is a `NonFiniteError`; weights and version are unchanged.", after=_VERSION)
    def test_a_step_that_is_not_finite_is_refused(self) -> None:
        rows = make_rows(seed=12)
        rows["advantages"][0] = torch.nan
        with must_raise(NonFiniteError, otherwise="it took a step on a loss of NaN."):
            self._policy.train(rows, KitLoss())
        with must_raise(NonFiniteError, otherwise="it took a step on a gradient of NaN of a finite loss."):
            self._policy.train(make_rows(seed=12), NanGradientLoss(1))
        self._check_state("after a refused step")

    @promise("`shutdown` may be called twice.")
    def test_shutdown_may_be_called_twice(self) -> None:
        self._policy.shutdown()
        self._policy.shutdown()

    @promise(
        "The learning rate of each step is that of `scheduler`, which counts optimizer steps, also after `load_checkpoint`.",
        after=_CONTINUED,
    )
    def test_learning_rates_follow_the_schedule(self) -> None:
        scheduler = SchedulerConfig(name="linear", kwargs={"num_warmup_steps": 2, "num_training_steps": 9})
        paths = self._paths("scheduled")
        with self.created_with(scheduler=scheduler):
            self._stepped(make_rows(seed=20), mbs=3)
            self._policy.train(make_rows(seed=20), KitLoss(), eval_mode=True)
            self._stepped(make_rows(seed=21))
            self._policy.save_checkpoint(*paths)
            saved = copy.deepcopy(self._reference)
            self._stepped(make_rows(seed=22))
            self._policy.load_checkpoint(*paths)
            self.subject().reference = saved
            self._stepped(make_rows(seed=24))
            self._check_weights("after steps with a schedule")

    @promise(
        "Scores and steps are the same with `sequence_packing` and `dynamic_batching`, if they are declared.",
        applies=_PACKING,
        after=_STEP,
    )
    def test_packing_changes_nothing(self) -> str:
        budget = {"enabled": True, "train_mb_tokens": 2 * WIDTH, "logprob_mb_tokens": 2 * WIDTH}
        for name in sorted(_PACKED & self.capabilities()):
            with self.created_with(**{name: budget}):
                self._check_weights(f"with {name}")
                self._stepped(make_rows(seed=26))
                found = self._check_weights(f"after a step with {name}")
        return found

    @promise(
        "With `precision: bfloat16`, steps smaller than its rounding add up, also after `load_checkpoint`.", after=_CONTINUED
    )
    def test_small_steps_add_up_in_bfloat16(self) -> str:
        rows, optimizer = make_rows(seed=25), OptimizerConfig(name="torch.optim.Adam", kwargs={"lr": 5e-5})
        with self.created_with(precision="bfloat16", optimizer=optimizer, max_grad_norm=None):
            first = self._policy.train(rows, KitLoss(), eval_mode=True)["loss"]
            losses = [self._reference.train(rows, KitLoss())["loss"] for _ in range(_SMALL_STEPS)]
            for _ in range(_SMALL_STEPS):
                self._policy.train(rows, KitLoss())
            change = self._policy.train(rows, KitLoss(), eval_mode=True)["loss"] - first
            paths, scores = self._paths("bfloat16"), []
            self._policy.save_checkpoint(*paths)
            for _ in range(2):
                for _ in range(_SMALL_STEPS):
                    self._policy.train(rows, KitLoss())
                scores.append(self._policy.get_logprobs(_scoring(rows))["logprobs"])
                self._policy.load_checkpoint(*paths)
            expected = self._reference.outcome(rows, KitLoss())["loss"] - losses[0]
        if not 0.75 * expected > change > 1.25 * expected:
            raise Found(f"{_SMALL_STEPS} steps change the loss by {change:.5f}, and with float32 weights by {expected:.5f}.")
        if not torch.equal(*scores):
            raise Found("steps after `load_checkpoint` differ from those before. Save the float32 weights that steps add to.")
        return f"{change:.5f}, with float32 weights {expected:.5f}"

    @promise("A frozen model gives ids from `vocab_size` on probability 0, or is a `NotSupportedError`.", after=_SCORES)
    def test_unused_tokens_have_probability_0(self) -> str:
        rows, used, weights = make_rows(seed=27), VOCABULARY // 2, self.model.make_weights()
        ids, lengths = rows["input_ids"].clamp_(max=used - 1), rows["input_lengths"]
        expected = self.model.logprobs(weights, ids, lengths, temperature=TEMPERATURE, used=used)
        with self.created_with(frozen=True, vocab_size=used), optional("the policy does not support `vocab_size`"):
            scores = scored(self._policy.get_logprobs, _scoring(rows))["logprobs"]
        return check_logprobs(scores, expected, tolerance=self.tolerance, when=f"with vocab_size {used}")

    test_rows_are_trained_with_their_images = images.test_rows_are_trained_with_their_images

    @property
    def _policy(self) -> PolicyInterface:
        return self.subject().policy

    @property
    def _sender(self) -> ColocatablePolicyInterface:
        if not isinstance(self._policy, ColocatablePolicyInterface):
            raise Found(f"{type(self._policy).__name__} is not a subclass of rl_core.interfaces.ColocatablePolicyInterface.")
        return self._policy

    @property
    def _reference(self) -> ReferenceTrainer:
        return self.subject().reference

    def _paths(self, name: str) -> tuple[Path, Path]:
        return self._folder / name / "weights", self._folder / name / "optimizer"

    def _stepped(self, rows: BatchedDataDict[Any], *, passed: Any = None, mbs: int | None = None) -> float:
        """Take a step in policy and reference, and compare the gradient norm, which is returned."""
        returned = self._policy.train(rows if passed is None else passed, KitLoss(), mbs=mbs)
        expected = self._reference.train(rows, KitLoss())
        for name in ("grad_norm", "lr"):
            _check_number(name, returned.get(name), expected[name])
        return expected["grad_norm"]

    def _continued(self) -> torch.Tensor:
        """Log-probabilities after two more steps."""
        for seed in (15, 16):
            self._stepped(make_rows(seed=seed))
        scores: torch.Tensor = self._policy.get_logprobs(_scoring(make_rows(seed=17)))["logprobs"]
        return scores

    def _sent(self) -> dict[str, torch.Tensor]:
        """Copies of the tensors of a refit, which are checked against its manifest."""
        policy, tensors = self._sender, {}
        usable = self.capabilities() - {"by_reference"} if self.uses_ray else self.capabilities()
        form = transfer(usable, self._folder / "sent.safetensors")
        manifest = policy.prepare_refit_info() or {}
        try:
            for names in policy.prepare_weights_for_ipc(_BUFFER):
                handles = policy.get_weights_ipc_handles(names, **form)
                bucket = open_handles(handles, torch.device("cpu"))
                tensors.update({name: tensor.detach().clone() for name, tensor in bucket.items()})
        finally:
            policy.finish_refit()
        found, stated = manifest_of(tensors), {name: (tuple(shape), dtype) for name, (shape, dtype) in manifest.items()}
        if found != stated:
            wrong = sorted(name for name in {*found, *stated} if found.get(name) != stated.get(name))
            raise Found(f"{wrong[0]} is {stated.get(wrong[0])} in the manifest, and was sent as {found.get(wrong[0])}.")
        return tensors

    def _check_weights(self, when: str, *, seed: int = 18, rows: BatchedDataDict[Any] | None = None) -> str:
        """Compare weights by the log-probabilities of rows."""
        rows = make_rows(seed=seed) if rows is None else rows
        scores = scored(self._policy.get_logprobs, _scoring(rows))["logprobs"]
        return self._check_scores(scores, self._reference, rows, when)

    def _check_sent(self) -> str:
        sent, expected = self._sent(), {name: weight.detach() for name, weight in self._reference.weights.items()}
        if different := sorted(sent.keys() ^ expected.keys()):
            raise Found(f"the names {', '.join(different)} are sent or in the checkpoint, not both.")
        for name, weight in expected.items():
            if sent[name].shape != weight.shape or not torch.allclose(sent[name].float(), weight, atol=1e-3):
                raise Found(f"{name} is not the trained weight of version {self._policy.weight_version}.")
        return f"{len(sent)} tensors"

    def _check_version(self, when: str) -> str:
        if (found := self._policy.weight_version) != self._reference.version:
            raise Found(f"the weight version is {found} {when}, and {self._reference.version} steps were taken.")
        return f"version {found}"

    def _check_state(self, when: str) -> None:
        self._check_version(when)
        self._check_weights(when)

    @torch.no_grad()
    def _check_scores(self, scores: torch.Tensor, trainer: ReferenceTrainer, rows: BatchedDataDict[Any], when: str) -> str:
        return check_logprobs(scores, trainer.logprobs(rows), tolerance=self.tolerance, when=when)


def _scoring(rows: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    return BatchedDataDict({key: rows[key] for key in ("input_ids", "input_lengths", "images") if key in rows})


def _check_number(name: str, found: Any, expected: float) -> None:
    if not isinstance(found, int | float) or not abs(found - expected) <= _RELATIVE * max(abs(expected), 1e-3):
        raise Found(f"`{name}` is {found}, and {expected:g} by the reference.")


NUM_ROWS, WIDTH = 8, 24


class KitLoss(LossFunction):
    """Minus the mean weighted probability of tokens, and of rows: each token has its own gradient, and both counts are used."""

    metric_reductions: ClassVar = {"weighted_logprobs": "sum"}

    @property
    def required_keys(self) -> frozenset[str]:
        return frozenset({"advantages"})

    def __call__(
        self,
        next_token_logprobs: torch.Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(1)
        weighted = mask * data["advantages"] * (next_token_logprobs / 8).exp()
        rows = (weighted.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum() / global_valid_seqs
        metric = (mask * data["advantages"] * next_token_logprobs.detach()).sum() / global_valid_toks
        return -weighted.sum() / global_valid_toks - rows, {"weighted_logprobs": metric}


def make_rows(*, seed: int) -> BatchedDataDict[Any]:
    """Rows of unequal lengths with the columns of training; row 2 is not trained on."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, WIDTH + 1, (NUM_ROWS,), generator=generator)
    lengths[0] = WIDTH
    position = torch.arange(WIDTH)
    inside = position < lengths.unsqueeze(1)
    ids = torch.randint(FIRST_BYTE, VOCABULARY - 2, (NUM_ROWS, WIDTH), generator=generator)
    return BatchedDataDict(
        input_ids=torch.where(inside, ids, 0),
        input_lengths=lengths,
        token_mask=(inside & (position >= 3)).float(),
        sample_mask=(torch.arange(NUM_ROWS) != 2).float(),
        advantages=torch.where(inside, torch.randn((NUM_ROWS, WIDTH), generator=generator), 0.0),
    )
