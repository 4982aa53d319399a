"""Checks that every method must pass."""
