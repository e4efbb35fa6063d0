"""The process that generates problems and scores answers, started as `python -m rl_envs.reasoning_gym.worker`.

Does not import torch. Some tasks draw from sets of texts, so their problems depend on the hash seed, which is the same in all
of these processes.
"""

from __future__ import annotations

import base64
import importlib
import inspect
import json
import math
import pickle
import re
import signal
import unicodedata
from functools import cache
from typing import Any

from rl_core.errors import ConfigError
from rl_envs.grading_worker import serve
from rl_envs.reasoning_gym.tasks import make_task, pickled

_EVALUATES = re.compile(r"\b(?:eval|parse_expr|sympify)\(")
_ATTRIBUTE = re.compile(r"[^\W\d]\w*\s*\.\s*[^\W\d]|(?<!\d)\.\s*[^\W\d]")
_CALL = re.compile(r"([^\W\d]\w*|[\])}'\"])\s*\(")
_ELEMENTARY = frozenset(("Abs", "Rational", "abs", "exp", "factorial", "ln", "log", "sqrt"))
_TRIGONOMETRIC = frozenset(("acos", "asin", "atan", "cos", "cosh", "cot", "csc", "sec", "sin", "sinh", "tan", "tanh"))
_FUNCTIONS = _ELEMENTARY | _TRIGONOMETRIC
"""Functions that an expression may call; calls of others could do more than calculate."""
_NOT_FINITE = re.compile(r"(?<![a-z])(?:nan|inf|infinity|oo|zoo)(?:[ij])?(?![a-z])", re.IGNORECASE)
_EXPONENT = re.compile(r"(?<![\w.])\d[\d_]*(?:\.[\d_]*)?e\+?\d[\d_]*", re.IGNORECASE)
_tasks: dict[str, Any] = {}


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    return _problem(request) if "problem" in request else _score(request)


def _problem(request: dict[str, Any]) -> dict[str, Any]:
    """A generated problem; without an index, only whether the task and its settings exist."""
    task, params, seed, size, index = pickle.loads(base64.b64decode(request["problem"]))
    try:
        problems = _made(task, params, seed=seed, size=size)
    except ConfigError as error:
        return {"config_error": str(error)}
    return {"entry": None if index is None else pickled(problems[index])}


def _score(request: dict[str, Any]) -> dict[str, Any]:
    task, params, entry = pickle.loads(base64.b64decode(request["row"]))
    signal.setitimer(signal.ITIMER_PROF, 0.0)  # loading a task is not the answer's time
    try:
        scorer = _made(task, params)
    except ConfigError as error:
        return {"config_error": str(error)}
    signal.setitimer(signal.ITIMER_PROF, request["timeout_s"])
    if non_finite_numbers(request["answer"]) - non_finite_numbers(str(request["expected_answer"])):
        return {"score": 0.0}
    if evaluates_answers(type(scorer).__module__) and could_be_code(request["answer"]):
        return {"score": None}
    score = float(scorer.score_answer(request["answer"], entry))
    return {"score": score if math.isfinite(score) else None}


def _made(task: str, params: dict[str, Any], *, seed: int = 0, size: int = 1) -> Any:
    key = json.dumps([task, params, seed, size], sort_keys=True, default=str)
    if key not in _tasks:
        _tasks[key] = make_task(task, params, seed=seed, size=size)
    return _tasks[key]


@cache
def evaluates_answers(module: str) -> bool:
    """Whether the module of a task evaluates text as a Python expression, which is unsafe for model output."""
    return _EVALUATES.search(inspect.getsource(importlib.import_module(module))) is not None


def non_finite_numbers(answer: str) -> set[str]:
    """The parts of an answer that a scorer could read as a number that is not finite: comparisons with `nan` are all false."""
    text = unicodedata.normalize("NFKC", answer)
    too_large = (number for number in _EXPONENT.findall(text) if math.isinf(float(number.replace("_", ""))))
    return {*map(str.lower, _NOT_FINITE.findall(text)), *too_large}


def could_be_code(answer: str) -> bool:
    """Whether a Python expression could do more than calculate: it has attributes, or calls other than those of `_FUNCTIONS`.

    SymPy evaluates texts in arguments too, so there must be no texts next to calls.
    """
    text = unicodedata.normalize("NFKC", answer)  # as Python reads identifiers
    called = set(_CALL.findall(text))
    has_texts = "'" in text or '"' in text
    hides_calls = any(sign in text for sign in ("__", "\\", "#", ":="))
    return hides_calls or _ATTRIBUTE.search(text) is not None or not called <= _FUNCTIONS or (bool(called) and has_texts)


def _warm_up() -> None:
    try:
        importlib.import_module("reasoning_gym")
    except ImportError:
        return  # the first row reports that the package is missing


if __name__ == "__main__":
    serve(_answer, warm_up=_warm_up)
