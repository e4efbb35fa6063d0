"""Weather prediction, the example of a custom environment: a condition in words."""
