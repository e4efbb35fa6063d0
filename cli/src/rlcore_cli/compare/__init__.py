"""`rlcore compare`: compares runs on the terminal and as an HTML page."""
