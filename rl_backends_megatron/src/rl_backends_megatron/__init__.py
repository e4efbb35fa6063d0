"""The megatron backend of rlcore."""
