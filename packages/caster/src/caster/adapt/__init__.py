"""Fit source statistics and adapt to batches: the estimator, layer transport, the Adapter."""
