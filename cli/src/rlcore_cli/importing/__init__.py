"""Converts configs of NeMo RL and reports what happened to each key."""
