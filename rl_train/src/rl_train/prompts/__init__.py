"""Prompt configs and few-shot examples: their files, and the templates that turn records into messages. Imports no torch."""
