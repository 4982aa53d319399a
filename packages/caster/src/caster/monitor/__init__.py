"""Monitor streams: a log of every batch, drift, risk, estimated accuracy, and an HTML page."""
