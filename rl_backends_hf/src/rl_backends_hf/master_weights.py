"""The float32 weights that an optimizer steps on, behind a model of any dtype; knows no optimizer.

A bfloat16 weight has 8 bits: a step of 1e-5 times its size would be rounded away. So the optimizer sees a float32 copy of each
weight that is not float32 itself, gradients of microbatches add up there in float32, and after a step the copy is rounded into
the model. Bytes a parameter, with Adam: bfloat16 2 + copy 4 + gradient 4 + moments 8 = 18; float32 4 + 4 + 8 = 16.
Under FSDP2 the sharded weights are float32 themselves and rounded as they are gathered: 16 bytes, divided by the ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import nn

_log = logging.getLogger(__name__)


class MasterWeights:
    """What the optimizer steps on: the model's own float32 parameters, and float32 copies of all others.

    Args:
        model: frozen parameters (without `requires_grad`) are left out; of tied ones there is one.
        model_dtype: the dtype in which the weights are computed with, saved and handed on.

    Attributes:
        parameters: name to what is stepped on.
        are_rounded: whether what is published is a rounded form, so that the masters are state of their own.
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
        """Whether any of them lies beside the model's own weight."""
        return bool(self._copies)

    def copy_to_model(self) -> None:
        """Round the masters into the model."""
        with torch.no_grad():
            for parameter, master in self._copies:
                parameter.copy_(master)

    def copy_from_model(self) -> None:
        """Set the masters to the model's weights."""
        with torch.no_grad():
            for parameter, master in self._copies:
                master.copy_(parameter)

    def load_exact(self, exact: Mapping[str, torch.Tensor]) -> None:
        """Set masters to the float32 weights that the model's were rounded from.

        A master that begins on the grid of its rounded form has to go half a step of that grid before anything of it is seen;
        masters that lie anywhere between move the published weights, on average, by as much as they move themselves.

        Args:
            exact: by name; those that do not round to the model's weight are left out, with a warning.
        """
        rounded = {id(master): parameter for parameter, master in self._copies}
        with torch.no_grad():
            for name, master in self.parameters.items():
                if id(master) not in rounded or name not in exact:
                    continue
                found = exact[name].to(master.device)
                if torch.equal(found.to(rounded[id(master)].dtype), rounded[id(master)]):
                    master.copy_(found)
                else:
                    _log.warning("%s was loaded otherwise in float32, so its master begins at the rounded weight", name)

    def move(self, device: torch.device) -> None:
        """Bring the copies to `device`; the model's own parameters move with the model."""
        for _, master in self._copies:
            master.data = master.data.to(device)

    def gradients(self) -> Mapping[str, torch.Tensor]:
        """Name to gradient, of those that have one."""
        return {name: master.grad for name, master in self.parameters.items() if master.grad is not None}

    def clear_gradients(self) -> None:
        """Forget all gradients."""
        for master in self.parameters.values():
            master.grad = None
        for parameter, _ in self._copies:
            parameter.grad = None


class _AccumulateInto:
    """A hook that adds a parameter's new gradient to its master's, and frees it."""

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
