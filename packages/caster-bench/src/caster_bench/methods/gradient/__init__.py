"""Methods that learn by gradients; each on its own copy of the network."""
