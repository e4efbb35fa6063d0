"""Mathematics: answers read from completions and compared symbolically, in processes that can be killed."""
