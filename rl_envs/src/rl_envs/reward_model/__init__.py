"""The environment `reward_model`: answers scored by a model that was trained on preferences."""
