"""Two ranks of which only one has rows with images, run as a program by test_images_ranks.py.

Arguments: folder of models by family, folder for results, and a free port for each worker.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, os.path.dirname(__file__))
sys.path.insert(1, os.path.dirname(os.path.dirname(__file__)))
import tiny_vlms
from conftest import NLL, SGD, counts_of, make_config, make_context
from rank_processes import fork_ranks

from rl_backends_hf.training.worker import HFPolicyWorker


def work(rank: int) -> None:
    """All families and cases on one rank."""
    models, out, ports = Path(sys.argv[1]), Path(sys.argv[2]), iter(map(int, sys.argv[3:]))
    for folder in sorted(models.iterdir()):
        for mode, precision, freeze in tiny_vlms.OF_RANKS:
            hf = {"data_parallel": mode, "freeze": freeze}
            fields = {"precision": precision, "optimizer": SGD, "max_grad_norm": None, "train_micro_batch_size": 2}
            worker = HFPolicyWorker(make_context(rank, 2, next(ports)), make_config(str(folder), hf=hf, **fields))
            worker.setup()
            rows = tiny_vlms.rows_of_ranks(folder.name)
            own = rows.slice(3 * rank, 3 * rank + 3)
            manifest = worker.weight_manifest()
            before = {name: tensor.clone() for name, tensor in worker.iter_weights()}
            logprobs = worker.get_logprobs(own)["logprobs"]
            [result] = worker.train(own, NLL(), counts=counts_of(rows))
            steps = {name: (before[name] - tensor).float() / SGD["kwargs"]["lr"] for name, tensor in worker.iter_weights()}
            sent = {name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in before.items()}
            found = {"logprobs": logprobs, "norm": result.grad_norm, "loss": result.loss, "steps": steps}
            torch.save({**found, "manifest": manifest, "sent": sent}, out / f"{folder.name}-{mode}-{precision}-{rank}.pt")
            worker.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    fork_ranks(2, work)
