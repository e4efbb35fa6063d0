"""Verifiable instructions: constraints on the form of an answer that a program can check."""
