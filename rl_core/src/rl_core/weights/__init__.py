"""Transfers the policy's weights to the generation backend and verifies them."""
