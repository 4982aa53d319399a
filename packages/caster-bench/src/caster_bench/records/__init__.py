"""Raw records of a run: every prediction, batch by batch, and what produced it."""
