"""A number game of several turns: the model guesses, the environment says higher or lower."""
