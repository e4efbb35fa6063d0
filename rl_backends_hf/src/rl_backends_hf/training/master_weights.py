"""Float32 master weights that the optimizer updates, for a model of any dtype.

A bfloat16 weight has 8 bits of precision, so a step of 1e-5 times its size would be rounded away. The optimizer therefore
updates a float32 copy of each weight that is not float32; gradients of microbatches accumulate there in float32, and after a
step the copy is rounded into the model. Bytes per parameter with Adam: bfloat16 2 + copy 4 + gradient 4 + moments 8 = 18;
float32 4 + 4 +
8 = 16. With FSDP2, the sharded weights are float32 and are rounded when gathered: 16 bytes, divided by the number of ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import nn

from rl_backends_hf.training.host_memory import HostMemory

_log = logging.getLogger(__name__)


class MasterWeights:
    """Parameters that the optimizer updates: the model's float32 parameters, and float32 copies of all others.

    Args:
        model: frozen parameters (without `requires_grad`) are excluded; tied ones occur once.
        model_dtype: dtype in which the weights are computed with, saved and exported.

    Attributes:
        parameters: name to parameter.
        are_rounded: whether exported weights are rounded, so that the masters must be saved separately.
    """

    def __init__(self, model: nn.Module, *, model_dtype: torch.dtype) -> None:
        self.are_rounded = model_dtype != torch.float32
        self.parameters: dict[str, nn.Parameter] = {}
        self._copies: list[tuple[nn.Parameter, nn.Parameter]] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            master = parameter
            if parameter.dtype != torch.float32:
                master = nn.Parameter(parameter.detach().float())
                self._copies.append((parameter, master))
                parameter.register_post_accumulate_grad_hook(_AccumulateInto(master))
            self.parameters[name] = master

    @property
    def are_copies(self) -> bool:
        """Whether any master is a copy of a model weight."""
        return bool(self._copies)

    def copy_to_model(self) -> None:
        """Copy the master weights into the model, rounded to its dtype."""
        with torch.no_grad():
            for parameter, master in self._copies:
                parameter.copy_(master)

    def copy_from_model(self) -> None:
        """Set the masters to the model's weights."""
        with torch.no_grad():
            for parameter, master in self._copies:
                master.copy_(parameter)

    def load_exact(self, exact: Mapping[str, torch.Tensor]) -> None:
        """Set masters to the float32 weights that the model's weights were rounded from.

        A master that starts exactly at its rounded value must move by half a rounding step before the model changes; masters
        that start anywhere in between change the model, on average, by as much as they move.

        Args:
            exact: by name; values that do not round to the model's weight are ignored with a warning.
        """
        rounded = {id(master): parameter for parameter, master in self._copies}
        with torch.no_grad():
            for name, master in self.parameters.items():
                if id(master) not in rounded or name not in exact:
                    continue
                value = exact[name].to(master.device)
                if torch.equal(value.to(rounded[id(master)].dtype), rounded[id(master)]):
                    master.copy_(value)
                else:
                    _log.warning(
                        "%s differs from its float32 value in the checkpoint, so its master starts at the rounded weight", name
                    )

    def move(self, device: torch.device, memory: HostMemory) -> None:
        """Move the copies to `device`; the model's own parameters move with the model."""
        for number, (_, master) in enumerate(self._copies):
            master.data = memory.move(("master", number), master.data, device)

    def gradients(self) -> Mapping[str, torch.Tensor]:
        """Name to gradient, for parameters that have one."""
        return {name: master.grad for name, master in self.parameters.items() if master.grad is not None}

    def clear_gradients(self) -> None:
        """Set all gradients to None."""
        for master in self.parameters.values():
            master.grad = None
        for parameter, _ in self._copies:
            parameter.grad = None


class _AccumulateInto:
    """Hook that adds a parameter's new gradient to its master's and frees it."""

    def __init__(self, master: nn.Parameter) -> None:
        self._master = master

    def __call__(self, parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if self._master.grad is None:
            self._master.grad = gradient.float()
        else:
            self._master.grad.add_(gradient)
