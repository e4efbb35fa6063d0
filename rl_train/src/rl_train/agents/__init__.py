"""Agents with their own control loop: they sample from the training engine through a local endpoint."""
