"""The environment `reward_model`: scores conversations with a trained reward model."""
