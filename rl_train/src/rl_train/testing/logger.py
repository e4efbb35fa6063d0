"""Conformance of loggers: what they accept, where they write, and what can be read back, also after a resume."""

from __future__ import annotations

import contextlib
import copy
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar, cast
from unittest import SkipTest

import torch

from rl_core.plugins.component import Kind
from rl_core.testing.comparisons import section_of
from rl_core.testing.promises import Condition, Conformance, Found, must_raise, promise
from rl_train.assembly.contracts import check_class
from rl_train.config.schema import LoggerConfig
from rl_train.metrics.logger import Logger
from rl_train.rollouts.records import rollout_records
from rl_train.rollouts.trajectory import Trajectory

_STEPS = {
    0: {"validation/accuracy": 0.25},
    1: {"reward/mean": -0.5, "loss": 2.0},
    2: {"reward/mean": 0.75, "loss": 1.5, "validation/accuracy": 0.5},
    3: {"reward/mean": 1.25, "loss": 2.0**-20, "env/sums/late": 4.0},
}
"""Numbers that float32 represents exactly."""
_ODD = {"validation/pass@4": math.nan, "env/x: hard (%)/ä": math.inf, "reward/mean": -math.inf, "loss": 3}
_TEXTS = ("", "a\nb\r\n\0", "\x1b[31m[bold]</b>", "\ud83d", "Ü🙂,;\"'", "x" * 100_000)
_TURN = {"token_ids": torch.tensor([3]), "generation_logprobs": torch.tensor([-0.5]), "weight_version": 0, "turn": 1}
_LOG = [{"role": "user", "content": "1+1=", "token_ids": torch.tensor([1, 2])}, {"role": "assistant", "content": "2", **_TURN}]
_ORIGIN = {"task_name": "sums", "group_id": 0, "index": 0, "ordinal": 0, "sample": 0, "metadata": {"expected_answer": "2"}}
_SCORES = {"reward": 1.0, "reward_parts": {"correct": 1.0}, "turn_rewards": [{"correct": 1.0}], "answer": "2", "turns": 1}
[_ROLLOUT] = rollout_records([Trajectory(**cast("Any", {"message_log": _LOG, **_ORIGIN, **_SCORES}))], torch.tensor([0.5]))
_PARAMS = {"grpo": {"max_num_steps": 3, "val_period": None}, "data": {"path": "Ü/ü", "list": [1, {"a": "x" * 7000}]}}


def _steps(*only: int) -> dict[int, dict[str, float]]:
    return {step: dict(_STEPS[step]) for step in only or _STEPS}


_MADE, _WRITTEN = "test_it_is_created_and_logs_steps", "test_every_step_is_written_once"
_READ = Condition(text="`written` is not defined", holds=lambda tests: hasattr(tests, "written"))


class LoggerConformance(Conformance[Any]):
    """Promises of loggers.

    Attributes:
        names: metrics that the logger writes with this `config`; all if empty.
        written: class method that reads back what was written to a run folder: pairs of a step and metrics, in their order.
    """

    kind = Kind.LOGGER
    minimum = 8
    names: ClassVar[Sequence[str]] = ()
    written: ClassVar[Any]

    @classmethod
    def make(cls, folder: Path) -> Logger:
        """Create the logger as a run does. Override it for a logger with other arguments."""
        component = cls.registered()
        check_class(creates := component.load(), Kind.LOGGER, ("config", "folder"))
        logger: Logger = creates(config=section_of(component, LoggerConfig, cls.config), folder=folder)
        return logger

    @promise("It is created with `config` and `folder`, and logs steps, each of which has other metrics.")
    def test_it_is_created_and_logs_steps(self) -> None:
        self._log(_steps())

    @promise("It accepts NaN, infinities, names with unusual characters, and a step without metrics.", after=_MADE)
    def test_it_accepts_every_metric(self) -> None:
        self._log({1: dict(_ODD), 2: {}, 3: {"loss": 0.0}})

    @promise("It accepts every text in rollouts: control characters, markup, unpaired surrogates.", after=_MADE)
    def test_it_accepts_every_text(self) -> None:
        rows = [{**_ROLLOUT, "prompt": text, "messages": [{"role": text, "content": text}]} for text in _TEXTS]
        self._log(_steps(1), rows=rows)

    @promise("It does not change metrics, rollouts and config: other loggers get them as well.", after=_MADE)
    def test_its_arguments_are_unchanged(self) -> None:
        steps, rows, params = given = copy.deepcopy((_steps(1), [_ROLLOUT], _PARAMS))
        before = copy.deepcopy(given)
        self._log(steps, rows=rows, params=params)
        for found, expected in zip(given, before, strict=True):
            if found != expected:
                raise Found(f"{str(expected)[:200]} is {str(found)[:200]} after the step.")

    @promise("`finish` may be called twice, before the first step, and while an error ends the run.", after=_MADE)
    def test_finish_may_be_called_twice(self) -> None:
        self._log({}).finish()
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            self._log(_steps(1)).finish()

    @promise("It writes no files to the working directory, which several runs may share.", after=_MADE)
    def test_the_working_directory_is_unchanged(self) -> None:
        with contextlib.chdir(self._new_folder()):
            self._log(_steps())
            if files := sorted(path.name for path in Path().iterdir()):
                raise Found(f"it wrote {', '.join(files)} there. Write to `folder`, the run folder.")

    @promise("It prints nothing to standard output, which belongs to the run's display.", after=_MADE)
    def test_it_prints_nothing(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            self._log(_steps())
        if output.getvalue():
            raise Found(f"it printed {output.getvalue()[:200]!r}. Use the module `logging` for messages.")

    @promise("If it cannot write to the run folder, it raises an error that names the folder.", after=_MADE)
    def test_a_folder_that_cannot_be_written_is_an_error(self) -> None:
        folder = self._new_folder()
        self._log(_steps(), folder)
        if not any(folder.iterdir()):
            raise SkipTest("it writes nothing to the run folder")
        (unusable := self._new_folder() / "file").touch()
        lost = f"the run folder {unusable} is a file, and there was no error, so all metrics were lost."
        with must_raise(Exception, naming=str(unusable), otherwise=lost):
            self._log(_steps(), unusable)

    @promise("After `finish`, every metric can be read back, once and in the order of the steps.", applies=_READ, after=_MADE)
    def test_every_step_is_written_once(self) -> None:
        folder = self._new_folder()
        self._log(_steps(), folder)
        self._check(self._series(self.written(folder)), self._series(_steps().items()))

    @promise("A resumed run keeps earlier steps; its values replace those of repeated steps.", applies=_READ, after=_WRITTEN)
    def test_a_resumed_run_continues(self) -> None:
        folder = self._new_folder()
        self._log(_steps(0, 1, 2), folder)
        repeated = {step: {name: value + 8 for name, value in metrics.items()} for step, metrics in _steps(2, 3).items()}
        expected = self._series((_steps() | repeated).items())
        self._log(repeated, folder)
        series = self._series(self.written(folder))
        self._check({name: sorted(dict(pairs).items()) for name, pairs in series.items()}, expected)

    @classmethod
    def _new_folder(cls) -> Path:
        return Path(mkdtemp(dir=cls._folder))

    @classmethod
    def _log(cls, steps: Mapping[int, Any], folder: Path | None = None, rows: Any = None, params: Any = None) -> Logger:
        """Log steps as a run does."""
        logger = cls.make(folder or cls._new_folder())
        logger.log_hyperparams(copy.deepcopy(_PARAMS) if params is None else params)
        for step, metrics in steps.items():
            logger.log_metrics(metrics, step)
            logger.log_rollouts(copy.deepcopy([_ROLLOUT]) if rows is None else rows, step)
        logger.finish()
        return logger

    def _series(self, rows: Iterable[tuple[int, Mapping[str, float]]]) -> dict[str, list[tuple[int, float]]]:
        """Steps and values by metric."""
        series: dict[str, list[tuple[int, float]]] = {}
        for step, name, value in ((step, *item) for step, metrics in rows for item in metrics.items()):
            if not self.names or name in self.names:
                series.setdefault(name, []).append((step, value))
        return series

    def _check(self, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        for name in {**expected, **found}:
            if found.get(name) != expected.get(name):
                raise Found(f"steps and values of {name!r} are {found.get(name)}, not {expected.get(name)}.")
