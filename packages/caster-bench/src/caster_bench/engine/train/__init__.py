"""Train the benchmark's source checkpoints from scratch."""
