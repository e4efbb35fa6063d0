"""Conformance of algorithms: short runs in this process with the kit's model, an installed policy and an installed engine."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, ClassVar
from unittest import SkipTest

import torch

from rl_core.plugins.component import Capability, Component, Kind, is_path
from rl_core.testing.promises import Conformance, Found, creation, promise
from rl_core.testing.reference import Llama
from rl_train.assembly.run_assembly import build_run
from rl_train.config.loader import LoadedConfig, load_config
from rl_train.run import Run

_STEPS, _SAVED, _ROWS, _RECORDS, _LENGTH = 4, 2, 64, 8, 48
_RELATIVE = 1e-3
"""Largest relative difference of a loss or gradient norm; float32 sums in another order differ by about 1e-6."""
_TRAINS, _SAME = "test_it_is_created_from_its_section", "test_equal_runs_are_equal"
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"


def reward(completions: list[str], **_: Any) -> list[float]:
    """The reward of the kit's environment: it differs between the samples of a prompt."""
    return [sum(text.encode()) % 17 / 16 for text in completions]


class _Trained:
    """What a run did: metrics by step, fingerprints of the weights, and what the algorithm took from its sources."""

    def __init__(self) -> None:
        self.metrics: dict[int, Mapping[str, float]] = {}
        self.fingerprints: list[str] = []
        self.groups: list[int] = []
        self.selects = False
        self.taken: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        """Name, tensor and copy of each column that was taken."""

    def observe(self, run: Run) -> None:
        """Record what the algorithm takes and reports."""

        def keep(batch: Mapping[str, Any]) -> None:
            columns = ((name, value) for name, value in batch.items() if isinstance(value, torch.Tensor))
            self.taken += [(name, value, value.clone()) for name, value in columns]

        if run.rollouts is not None:
            take: Callable[..., Any] = run.rollouts.take

            def taking(step: int, groups: int, selection: Any = None) -> Any:
                self.groups, self.selects = [*self.groups, groups], self.selects or selection is not None
                rollouts = take(step, groups, selection)
                keep(rollouts.batch)
                return rollouts

            run.rollouts.take = taking  # type: ignore[method-assign]
        if run.batches is not None:
            next_batch = run.batches.next_batch

            def following() -> Any:
                keep(batch := next_batch())
                return batch

            run.batches.next_batch = following  # type: ignore[method-assign]
        run.on_step = self.metrics.__setitem__


class AlgorithmConformance(Conformance[_Trained]):
    """Promises of algorithms.

    Attributes:
        settings: path of the settings model, if `component` is the path of a training function.
        policy: further keys of the section `policy`.
    """

    kind = Kind.ALGORITHM
    minimum = 8
    settings: ClassVar[str] = ""
    policy: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def loaded(cls, **policy: Any) -> LoadedConfig:
        """The config of a run with the components that `runtime_needs` names."""
        section: dict[str, Any] = {"max_num_steps": _STEPS, "seed": 3, "val_period": 0, **cls.config}
        paths = {"algorithm": {"train": cls.component, "config": cls.settings}} if is_path(cls.component) else {}
        name = "tested" if paths else cls.component
        model: Any = (Component.from_path(cls.settings).load if paths else cls.registered().load_config)()
        settings = model(**section)
        if settings.records_key is not None:
            section.setdefault(settings.records_key, _RECORDS)
        needs = settings.runtime_needs
        backends = {kind: cls._backend(kind) for kind in (Kind.POLICY, Kind.GENERATION)}
        network: dict[str, Any] = {"backend": backends[Kind.POLICY], "model_name": str(cls._folder / "model")}
        network |= {"precision": "float32", "max_total_sequence_length": _LENGTH, "tokenizer": {"chat_template": _TEMPLATE}}
        step = {"train_micro_batch_size": 4, "optimizer": {"kwargs": {"lr": 0.01}}, **cls.policy, **policy}
        engine = {"generation": {"backend": backends[Kind.GENERATION], "max_new_tokens": 8}} if needs.samples else {}
        kind = settings.record_kind
        dataset = "jsonl" if kind == "conversations" else "preference"
        answer = {"response_key": "expected_answer"} if needs.records and kind == "conversations" else {}
        answer |= {"label_key": "label"} if kind == "unpaired" else {}
        sections = {
            name: section,
            **paths,
            "policy": {**network, **step, **engine},
            **{companion: {**network, "model_name": str(cls._folder / "companion")} for companion in needs.companions},
            "data": {"train": {"dataset_name": dataset, "path": str(cls._folder / "rows.jsonl"), **answer}},
            "env": {"function": {"reward_fn": f"{__name__}.reward"}} if needs.rollouts and needs.rollouts.rewarded else {},
            "cluster": {"backend": "in_process"},
            "checkpointing": {"save_period": _SAVED},
        }
        return load_config(sections, registry=cls.registry())

    @classmethod
    def trained(cls, name: str, *, resume: str = "", **policy: Any) -> _Trained:
        """Run the algorithm in a folder of this name, from the checkpoint of another run or from the beginning."""
        loaded, done, folder = cls.loaded(**policy), _Trained(), cls._folder / name
        folder.mkdir()
        with ExitStack() as exits:
            run = build_run(loaded, folder=folder, registry=cls.registry(), exits=exits)
            done.observe(run)
            if resume:
                assert run.checkpoints is not None
                run.first_step = run.checkpoints.restore(cls._folder / resume / "checkpoints" / f"step_{_SAVED:06d}")
            done.fingerprints.append(run.policy.weight_fingerprint())
            loaded.components[loaded.run.algorithm_name].load()(run.config.algorithm, run)
            done.fingerprints.append(run.policy.weight_fingerprint())
        return done

    @classmethod
    def create(cls) -> _Trained:
        Llama().save(cls._folder / "model", Llama().make_weights())
        Llama().save(cls._folder / "companion", Llama().make_weights(seed=4))
        drawn, rows = random.Random(7), []
        for number in range(_ROWS):
            texts = {"question": f"{number}+1=", "expected_answer": str(number + 1)}
            other = str(drawn.randrange(1000, 9999))
            pair = {"prompt": texts["question"], "chosen": texts["expected_answer"], "rejected": other}
            label = number % 2 == 0
            rows.append({**texts, **pair, "completion": pair["chosen" if label else "rejected"], "label": label})
        (cls._folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return cls.trained("first")

    test_it_is_created_from_its_section = creation(
        "It trains with the policy, the engine and the data that its `runtime_needs` name, for the steps of `run.steps()`."
    )

    @promise(
        "Metrics of each step are finite numbers by name, with the loss of its training (`run.record_training`).", after=_TRAINS
    )
    def test_metrics_are_finite(self) -> str:
        metrics = self.subject().metrics
        if (steps := sorted(metrics)) != list(range(1, _STEPS + 1)):
            raise Found(f"the steps {steps} have metrics, not 1 to {_STEPS}. Iterate over `run.steps()`.")
        for step, numbers in metrics.items():
            for name, value in numbers.items():
                if not isinstance(name, str) or not isinstance(value, int | float) or not math.isfinite(value):
                    raise Found(f"the metric {name!r} of step {step} is {value!r}.")
        if not any("loss" in numbers for numbers in metrics.values()):
            raise Found("no step has a `loss`. Pass what `train` returns to `run.record_training`.")
        return f"{len({name for numbers in metrics.values() for name in numbers})} metrics"

    @promise("It does not change the tensors of the rows that it takes; it may add columns or replace them.", after=_TRAINS)
    def test_its_rows_are_unchanged(self) -> None:
        changed = {name for name, value, before in self.subject().taken if not torch.equal(value, before)}
        if changed:
            raise Found(f"it changed {', '.join(sorted(changed))} in place. Compute new tensors, or change a `clone()`.")

    @promise(
        "It takes the groups that its `RolloutNeeds` declare, and passes a selection only with `selects_groups`.", after=_TRAINS
    )
    def test_it_takes_what_it_declares(self) -> str:
        needs = self.loaded().run.algorithm.runtime_needs.rollouts
        if needs is None:
            return "it takes no rollouts"
        if wrong := {groups for groups in self.subject().groups if groups != needs.prompts_per_draw}:
            raise Found(f"it takes {wrong.pop()} groups at once, and declares {needs.prompts_per_draw} (`prompts_per_draw`).")
        if self.subject().selects and not needs.selects_groups:
            raise Found("it passes a selection to `run.rollouts.take`, and declares no `selects_groups`.")
        return f"{needs.prompts_per_draw} groups at once"

    @promise("With a learning rate above 0, the weights change.", after=_TRAINS)
    def test_the_weights_change(self) -> None:
        before, after = self.subject().fingerprints
        if before == after:
            raise Found(f"the weights are the same after {_STEPS} steps.")

    @promise("Two runs with the same seed have the same losses and weights.", after=_TRAINS)
    def test_equal_runs_are_equal(self) -> None:
        random.seed()
        self._check_same(self.trained("second"), "a second run")

    @promise("Loss and gradient do not depend on the number of rows in a microbatch.", after=_SAME)
    def test_microbatches_do_not_change_the_loss(self) -> None:
        numbers = self.trained("microbatches", train_micro_batch_size=1).metrics[1]
        for name in ("loss", "grad_norm"):
            found, expected = numbers.get(name, 0.0), self.subject().metrics[1].get(name, 0.0)
            if abs(found - expected) > _RELATIVE * max(abs(expected), 1e-3):
                raise Found(f"`{name}` of step 1 is {found:g} with one row in a microbatch, and {expected:g} with four.")

    @promise("A run that is resumed has the losses and weights of one that was not interrupted (`run.keep`).", after=_SAME)
    def test_a_resumed_run_is_equal(self) -> None:
        self._check_same(self.trained("resumed", resume="first"), f"a run that was resumed after step {_SAVED}")

    def _check_same(self, found: _Trained, what: str) -> None:
        expected = self.subject()
        for step, numbers in found.metrics.items():
            if numbers.get("loss") != (loss := expected.metrics[step].get("loss")):
                raise Found(f"{what} has the loss {numbers.get('loss')} in step {step}, and the first run {loss}.")
        if found.fingerprints[-1] != expected.fingerprints[-1]:
            raise Found(f"{what} has the losses of the first run, and other weights.")

    @classmethod
    def _backend(cls, kind: Kind) -> str:
        """The first installed backend of a kind that runs in this process."""
        usable = [each.name for each in cls.registry().all(kind) if Capability.IN_PROCESS in each.capabilities]
        if not usable:
            raise SkipTest(f"no {kind.label} with the capability `{Capability.IN_PROCESS}` is installed")
        return min(usable)
