"""Stateless random numbers: the finaliser of splitmix64, elementwise over int64 tensors."""

from __future__ import annotations

import torch


def mix(state: torch.Tensor) -> torch.Tensor:
    """A bijection of int64 whose outputs look independent (Steele, Lea, Flood 2014), elementwise."""
    # The multipliers are 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB.
    state = (state ^ shift_right(state, 30)) * -4658895280553007687
    state = (state ^ shift_right(state, 27)) * -7723592293110705685
    return state ^ shift_right(state, 31)


def shift_right(state: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift as of uint64: `>>` of int64 copies the sign bit."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def derived_seeds(seed: int, call: int, rows: int) -> torch.Tensor:
    """[rows] int64, distinct seeds for the rows of one call, if the batch has none."""
    base = mix(mix(torch.tensor([seed])) + call)
    return mix(base + torch.arange(rows))
