"""Whole jobs, files in and files out: what the command line calls, one file a job.

Their errors name options as they are typed. What lies below names arguments, which
`caster.cli.words` translates.
"""
