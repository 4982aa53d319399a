"""Errors a user can act on: one line, what is wrong and what to do."""


class CasterError(ValueError):
    """Bad input. The message is one line; the command line prints it without a traceback."""


class InputTypeError(CasterError, TypeError):
    """Values that are not numbers; scikit-learn expects a TypeError for some of them."""


class StateError(CasterError):
    """A state file that cannot be trusted, or does not belong to what it is used with."""
