"""The paper's mathematics: one equation, one function, on any array-API namespace.

Nothing here reads a file, a clock or a seed, and nothing chooses an array library: every
function works in the namespace, dtype and device of the arrays it is given.
"""
