"""Sending the policy's weights to the engine and verifying that they have arrived."""
