"""Text games of other libraries: Gymnasium, TextArena and SkyRL Gym, each through one small adapter."""
