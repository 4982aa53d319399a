"""Sweeps at work: checkpoints admitted, cells run, raw records kept."""
