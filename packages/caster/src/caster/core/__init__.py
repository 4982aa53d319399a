"""The paper's mathematics: one equation, one function, on any array-API namespace.

Nothing here reads a file, a clock or a seed, or chooses an array library: every function works
in the namespace, dtype and device of its arguments.
"""
