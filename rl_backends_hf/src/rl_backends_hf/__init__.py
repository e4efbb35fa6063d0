"""The Transformers backend of rlcore: policy and generation."""
