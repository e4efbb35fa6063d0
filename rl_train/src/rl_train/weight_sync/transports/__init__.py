"""The built-in weight transports: by reference, over shared memory, over a process group, and through files."""
