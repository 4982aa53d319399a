"""Pictures: what there is, what it is called, and what cannot be read."""
