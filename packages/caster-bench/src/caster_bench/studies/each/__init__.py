"""One module a study: scores in, a frozen result, and the section it makes of it."""
