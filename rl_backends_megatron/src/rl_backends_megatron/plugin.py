"""Registers Megatron-Core as policy backend; strings only, so it imports no torch."""
