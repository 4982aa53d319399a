"""Tests of the corruptions."""
