"""Source checkpoints for the benchmark: trained from nothing, on the data they are adapted from."""
