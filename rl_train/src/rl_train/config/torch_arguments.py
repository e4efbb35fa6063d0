"""Arguments of torch's optimizers and learning-rate schedulers, read from its source files, so that torch is not imported."""

from __future__ import annotations

import ast
from functools import cache

from rl_train.config.static_attribute import find_class

OPTIM, LR_SCHEDULER = "torch.optim", "torch.optim.lr_scheduler"

UNUSABLE_OPTIMIZERS: dict[str, str] = {
    "LBFGS": "it needs a closure that recomputes the loss, which training steps do not have",
    "SparseAdam": "it needs sparse gradients, but those of language models are dense",
    "Optimizer": "it is the base class of the optimizers",
}
"""Classes of `torch.optim` that cannot train a policy, and why."""

SCHEDULERS = (
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LinearLR",
    "MultiStepLR",
    "OneCycleLR",
    "PolynomialLR",
    "StepLR",
)
"""Schedulers of `torch.optim.lr_scheduler`, for suggestions."""

UNUSABLE_SCHEDULERS: dict[str, str] = {
    "ChainedScheduler": "it takes scheduler objects, which YAML cannot represent",
    "LRScheduler": "it is the base class of the schedulers",
    "LambdaLR": "it takes a function, which YAML cannot represent",
    "MultiplicativeLR": "it takes a function, which YAML cannot represent",
    "ReduceLROnPlateau": "it needs a metric at each step, but schedules are stepped without one",
    "SequentialLR": "it takes scheduler objects, which YAML cannot represent",
}
"""Classes of `torch.optim.lr_scheduler` that cannot be used as a schedule, and why."""

DECAY_MATRICES_ONLY = "decay_matrices_only"
"""Additional argument of `optimizer.kwargs`: true excludes biases and norms (all one-dimensional tensors) from weight decay."""


@cache
def arguments_of(module: str, name: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The required and the optional arguments of a class of torch, without its first, the parameters or the optimizer.

    None if its signature cannot be read; then only its name is checked.
    """
    source = find_class(module, name)
    for method in () if source is None else source.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            positional = [argument.arg for argument in method.args.args]
            first_default = len(positional) - len(method.args.defaults)
            by_name = list(zip((argument.arg for argument in method.args.kwonlyargs), method.args.kw_defaults, strict=True))
            required = [*positional[2:first_default], *(key for key, default in by_name if default is None)]
            optional = [*positional[max(first_default, 2) :], *(key for key, default in by_name if default is not None)]
            return tuple(required), tuple(optional)
    return None
