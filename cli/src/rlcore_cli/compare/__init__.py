"""`rlcore compare`: several runs against each other, on the terminal and as a page."""
