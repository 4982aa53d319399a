"""Whole jobs, files in and files out: what the command line calls, one file a job."""
