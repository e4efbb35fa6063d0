"""The number of OpenMP threads with which a thread packs weights and computes.

On a CPU, oneDNN chooses the layout of packed weights by the OpenMP thread count of the thread that packs them. vLLM keeps what
it built for the first weights of a size until the process ends, and reads later weights of that size in the same layout.
Weights packed with another count are therefore read wrongly, without an error.
"""

import torch


def use_torch_threads() -> None:
    """Let the calling thread compute with torch's number of threads.

    A new thread starts with OpenMP's default, and torch sets its own number only in the thread's first operation that asks for
    it. That may be after oneDNN has packed a weight, or in the middle of vLLM's first step, which vLLM refuses.
    """
    torch.get_num_threads()
