"""`rlcore report`: a run folder as one page of HTML that needs nothing but a browser."""
