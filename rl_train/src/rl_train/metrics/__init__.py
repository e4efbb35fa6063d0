"""Values with their reduction, timing, and where they are written."""
