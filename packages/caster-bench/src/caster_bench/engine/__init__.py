"""Run sweeps: admit checkpoints, run cells, write raw records."""
