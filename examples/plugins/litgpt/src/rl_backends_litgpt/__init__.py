"""LitGPT models as policy and engine of rlcore."""
