"""Sliding puzzles: a multi-turn game with a board, legal moves and a reward for solving it."""
