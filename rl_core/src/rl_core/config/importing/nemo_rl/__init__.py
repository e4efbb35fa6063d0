"""What is known of NeMo RL's config: `table` has the keys, the other rooms the values that take more than another name."""
