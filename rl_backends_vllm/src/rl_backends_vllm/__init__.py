"""The vllm backend of rlcore."""
