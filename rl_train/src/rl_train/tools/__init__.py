"""Tool calls of models: parsing them from sampled tokens, and the tools that a run's environments offer."""
