"""`policy.generation` with `backend: vllm`; imports no torch."""
