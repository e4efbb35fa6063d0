"""Conformance of datasets: records are a function of the section and the index, in every process and order."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
from collections.abc import Mapping
from itertools import chain
from typing import Any, ClassVar

from rl_core.config.schema import DatasetConfig
from rl_core.data.process_seed import seed_process
from rl_core.errors import DataError
from rl_core.plugins.component import Kind
from rl_core.testing.comparisons import section_of
from rl_core.testing.promises import Condition, Conformance, Found, must_raise, promise, run_elsewhere
from rl_train.data.conversations import read_messages
from rl_train.data.datasets import make_dataset, record_of
from rl_train.data.holdout import prompt_digest

_MOST = 16
_LISTS: Mapping[str, tuple[str, ...]] = {
    "conversations": ("messages",),
    "pairs": ("prompt", "chosen", "rejected"),
    "unpaired": ("prompt", "completion"),
}
_FORM, _EQUAL, _SEED = "test_records_have_the_documented_form", "test_equal_reads_are_equal", "test_other_seeds_change_nothing"
_PROCESS = """
from rl_train.testing import DatasetConformance
class Tests(DatasetConformance):
    component, config = {component!r}, {config!r}
print("DIGESTS", *Tests.digests(Tests.make()))
"""

_BAD = Condition(text="`bad_rows` is not set", holds=lambda tests: bool(getattr(tests, "bad_rows", None)))


def _drawn() -> tuple[float, ...]:
    import numpy as np  # heavy libraries, which the other process does not need
    import torch

    return random.random(), float(np.random.random()), float(torch.rand(()))


class DatasetConformance(Conformance[Any]):
    """Promises of datasets.

    Attributes:
        bad_rows: values of the section with which a row is bad, by the text that names the row in the error, such as
            `{"wrong.jsonl, row 3": {"path": "wrong.jsonl"}}`.
    """

    kind = Kind.DATASET
    minimum = 8
    created_again = True
    bad_rows: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @classmethod
    def make(cls, **changes: Any) -> Any:
        """Create the dataset, as a run does."""
        return make_dataset(cls.registered().load(), cls.section(**changes))

    @classmethod
    def section(cls, **changes: Any) -> Any:
        """The section of the dataset, with other values of some keys."""
        return section_of(cls.registered(), DatasetConfig, {"dataset_name": cls.component, **cls.config, **changes})

    @classmethod
    def records(cls, dataset: Any) -> dict[int, Any]:
        """The first records and the last one, by index."""
        indices = sorted({*range(min(_MOST, len(dataset))), len(dataset) - 1})
        return {index: record_of(dataset, index, name=cls.component) for index in indices}

    @classmethod
    def digests(cls, dataset: Any) -> list[str]:
        """Hashes of `records`, which can be compared between processes."""
        texts = (
            json.dumps(record, sort_keys=True, default=lambda value: type(value).__name__)
            for record in cls.records(dataset).values()
        )
        return [str(len(dataset)), *(hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for text in texts)]

    @classmethod
    def create(cls) -> Any:
        return cls.make()

    @promise("It is created with its config section alone, and has at least one record.")
    def test_it_is_created_from_its_section(self) -> str:
        return f"{len(self.subject())} records"

    @promise("Records have the messages of their kind (docs/data.md), and other keys of the documented types.")
    def test_records_have_the_documented_form(self) -> None:
        kind = self.section().kind_of_records
        for index, record in self.records(self.subject()).items():
            lists = [_LISTS[kind]] if kind else [each for each in _LISTS.values() if each[-1] in record]
            for name in lists[0] if lists else ("messages",):
                read_messages(list(record[name]), f"`{name}` of record {index}", role="user")
            info, task = record.get("extra_env_info", {}), record.get("task_name", "")
            if not isinstance(info, Mapping) or not isinstance(task, str):
                raise Found(f"record {index} has the `extra_env_info` {info!r} and the `task_name` {task!r}.")

    @promise("Index i is the same record in every read, in any order, and the length stays the same.", after=_FORM)
    def test_equal_reads_are_equal(self) -> None:
        dataset = self.subject()
        before = self.digests(dataset)
        for index in reversed(range(min(_MOST, len(dataset)))):
            dataset[index]
        self._check(self.digests(dataset), before, "a second read")

    @promise("A record may be changed after it was read: later reads return it unchanged.", after=_EQUAL)
    def test_records_may_be_changed(self) -> None:
        before = self.digests(self.subject())
        for record in self.records(self.subject()).values():
            lists = [record[name] for name in ("messages", "prompt", "chosen", "rejected", "completion") if name in record]
            for value in (record.get("extra_env_info"), *chain(*lists)):
                if isinstance(value, dict):
                    value["rlcore"] = "changed"
            for messages in lists:
                messages.append({"role": "assistant", "content": "changed"})
        self._check(self.digests(self.subject()), before, "a read after earlier records were changed")

    @promise("Records do not depend on the global random state, and reading them does not change it.", after=_EQUAL)
    def test_other_seeds_change_nothing(self) -> None:
        found = []
        for seed in (1, 2):
            seed_process(seed)
            expected = _drawn()
            seed_process(seed)
            found.append(self.digests(self.make()))
            if _drawn() != expected:
                raise Found("reading draws from the global random state. Use `random.Random(index)`.")
        self._check(found[1], found[0], "a dataset that was made with another global seed")

    @promise("Two datasets with equal sections have equal records: training and validation may share one.", after=_SEED)
    def test_instances_are_equal(self) -> None:
        self._check(self.digests(self.make()), self.digests(self.subject()), "a second dataset")

    @promise("Another process reads the same records, so that a run can be resumed.", after="test_instances_are_equal")
    def test_other_processes_read_the_same(self) -> None:
        code = _PROCESS.format(component=self.component, config=dict(self.config))
        output, _ = run_elsewhere(code, "reading the records in another process")
        self._check(output.partition("DIGESTS")[2].split(), self.digests(self.subject()), "another process")

    @promise("Records can be pickled, because rollouts move between processes.", after=_FORM)
    def test_records_can_be_pickled(self) -> None:
        for record in self.records(self.subject()).values():
            if pickle.loads(pickle.dumps(record)) != record:
                raise Found(f"a pickled record differs from {str(record)[:200]}.")

    @promise("Prompts consist of texts and numbers, so that rows can be held out by their hash.", after=_FORM)
    def test_prompts_can_be_hashed(self) -> None:
        for index in self.records(self.subject()):
            prompt_digest(self.subject(), index)

    @promise("A bad row is a `DataError` that names the row, and not the end of the data.", applies=_BAD)
    def test_bad_rows_are_named(self) -> None:
        for name, values in self.bad_rows.items():
            with must_raise(DataError, naming=name, otherwise=f"all records could be read with {values}."):
                dataset = self.make(**values)
                [dataset[index] for index in range(len(dataset))]

    def _check(self, found: list[str], expected: list[str], what: str) -> None:
        if found[0] != expected[0]:
            raise Found(f"{what} has {found[0]} records, not {expected[0]}.")
        if found != expected:
            number = next(number for number, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
            raise Found(f"{what} has another record {number - 1}.")
