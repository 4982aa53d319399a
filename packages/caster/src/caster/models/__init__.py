"""Frozen models of every kind behind one interface: a batch in, features and logits out."""
