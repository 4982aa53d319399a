"""Watch streams: a log of every batch, drift, risk and estimated accuracy, and their page."""
