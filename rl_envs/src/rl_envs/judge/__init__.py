"""A language model behind an OpenAI-compatible server as a judge of answers."""
