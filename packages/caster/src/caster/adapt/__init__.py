"""Fit source statistics, and adapt batches by them: the estimator, the layers, the Adapter."""
