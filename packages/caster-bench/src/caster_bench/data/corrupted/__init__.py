"""Corrupted sets: what they are made of, who makes them, how they lie on the disk."""
