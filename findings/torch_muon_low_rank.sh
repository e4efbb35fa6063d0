#!/usr/bin/env bash
# torch 2.13: `torch.optim.Muon` orthogonalizes in bfloat16, also the gradients of float32 weights. If a gradient has few large singular values, which is so
# with few tokens, most of an update is amplified rounding: of a gradient of rank 1, 70 % of the update's energy (its squared norm) lies outside of the
# row and column of the gradient, and the update is 1.9 times as large as the same iteration in float64, which leaves zeros at zero. A gradient of full rank
# differs by 2 %. A good guess would be that computing in bfloat16 costs such a percent or two for all gradients.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import torch

SIZE, COEFFICIENTS, STEPS = 256, (3.4445, -4.7750, 2.0315), 5  # Muon's defaults


def update_of(gradient):
    """One step from zero momentum and without weight decay; its scale for a square matrix is the learning rate."""
    weight = torch.nn.Parameter(torch.zeros_like(gradient))
    weight.grad = gradient
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0).step()
    return -weight.detach().double()


def orthogonalized(gradient):
    """The Newton-Schulz iteration of Muon in float64."""
    first, second, third = COEFFICIENTS
    matrix = gradient.double() / gradient.double().norm()
    for _ in range(STEPS):
        gram = matrix @ matrix.T
        matrix = first * matrix + (second * gram + third * gram @ gram) @ matrix
    return matrix


def compared(rank):
    """Norms of both updates, and the share of energy outside of the gradient's singular vectors."""
    draw = torch.Generator().manual_seed(0)
    gradient = torch.randn(SIZE, rank, generator=draw) @ torch.randn(rank, SIZE, generator=draw)
    update, exact = update_of(gradient), orthogonalized(gradient)
    left, _, right = torch.linalg.svd(gradient.double())
    inside = left[:, :rank].T @ update @ right[:rank].T
    outside = 1 - (inside.norm() / update.norm()).item() ** 2
    return update.norm().item(), exact.norm().item(), outside, ((update - exact).norm() / exact.norm()).item()


print("torch", torch.__version__, "float32 weights,", SIZE, "x", SIZE)
for rank in (1, 4, 16, SIZE):
    norm, exact, outside, error = compared(rank)
    print(f"rank {rank}: norm {norm:.3g}, in float64 {exact:.3g}; energy outside {outside:.0%}; relative difference {error:.2g}")
    assert {1: outside > 0.5 and error > 1, 4: outside > 0.2, 16: outside > 0.03, SIZE: error < 0.03}[rank]
PY
