"""Pools of workers that run independent calls, such as the processes of an environment."""
