"""How the policy's weights reach the generation backend, and the proof that they arrived."""
