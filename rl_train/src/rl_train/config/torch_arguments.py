"""Arguments of torch's optimizers and learning-rate schedulers, so that configs can be checked without torch.

A test compares both tables with the installed torch. For a class that is missing here, only the name is checked.
"""

from __future__ import annotations

OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "ASGD": ("lr", "lambd", "alpha", "t0", "weight_decay", "foreach", "maximize", "differentiable", "capturable"),
    "Adadelta": ("lr", "rho", "eps", "weight_decay", "foreach", "capturable", "maximize", "differentiable"),
    "Adafactor": ("lr", "beta2_decay", "eps", "d", "weight_decay", "foreach", "maximize"),
    "Adagrad": (
        "lr",
        "lr_decay",
        "weight_decay",
        "initial_accumulator_value",
        "eps",
        "foreach",
        "maximize",
        "differentiable",
        "fused",
    ),
    "Adam": (
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "amsgrad",
        "foreach",
        "maximize",
        "capturable",
        "differentiable",
        "fused",
        "decoupled_weight_decay",
    ),
    "AdamW": (
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "amsgrad",
        "maximize",
        "foreach",
        "capturable",
        "differentiable",
        "fused",
    ),
    "Adamax": ("lr", "betas", "eps", "weight_decay", "foreach", "maximize", "differentiable", "capturable"),
    "Muon": ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
    "NAdam": (
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "momentum_decay",
        "decoupled_weight_decay",
        "foreach",
        "maximize",
        "capturable",
        "differentiable",
    ),
    "RAdam": (
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "decoupled_weight_decay",
        "foreach",
        "maximize",
        "capturable",
        "differentiable",
    ),
    "RMSprop": (
        "lr",
        "alpha",
        "eps",
        "weight_decay",
        "momentum",
        "centered",
        "capturable",
        "foreach",
        "maximize",
        "differentiable",
    ),
    "Rprop": ("lr", "etas", "step_sizes", "capturable", "foreach", "maximize", "differentiable"),
    "SGD": (
        "lr",
        "momentum",
        "dampening",
        "weight_decay",
        "nesterov",
        "maximize",
        "foreach",
        "differentiable",
        "fused",
    ),
}
"""Optimizers of `torch.optim` and their keyword arguments; all have defaults."""

UNUSABLE_OPTIMIZERS: dict[str, str] = {
    "LBFGS": "it needs a closure that recomputes the loss, which training steps do not have",
    "SparseAdam": "it needs sparse gradients, but those of language models are dense",
    "Optimizer": "it is the base class of the optimizers",
}
"""Classes of `torch.optim` that cannot train a policy, and why."""

SCHEDULERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "ConstantLR": ((), ("factor", "total_iters", "last_epoch")),
    "CosineAnnealingLR": (("T_max",), ("eta_min", "last_epoch")),
    "CosineAnnealingWarmRestarts": (("T_0",), ("T_mult", "eta_min", "last_epoch")),
    "CyclicLR": (
        ("base_lr", "max_lr"),
        (
            "step_size_up",
            "step_size_down",
            "mode",
            "gamma",
            "scale_fn",
            "scale_mode",
            "cycle_momentum",
            "base_momentum",
            "max_momentum",
            "last_epoch",
        ),
    ),
    "ExponentialLR": (("gamma",), ("last_epoch",)),
    "LinearLR": ((), ("start_factor", "end_factor", "total_iters", "last_epoch")),
    "MultiStepLR": (("milestones",), ("gamma", "last_epoch")),
    "OneCycleLR": (
        ("max_lr",),
        (
            "total_steps",
            "epochs",
            "steps_per_epoch",
            "pct_start",
            "anneal_strategy",
            "cycle_momentum",
            "base_momentum",
            "max_momentum",
            "div_factor",
            "final_div_factor",
            "three_phase",
            "last_epoch",
        ),
    ),
    "PolynomialLR": ((), ("total_iters", "power", "last_epoch")),
    "StepLR": (("step_size",), ("gamma", "last_epoch")),
}
"""Schedulers of `torch.optim.lr_scheduler`: required and optional keyword arguments, without the optimizer."""

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
