"""The one exception a user sees: a sentence, never a traceback."""


class LLDSError(ValueError):
    """A mistake in the input, a setting or the environment that the user can mend.

    The message is one sentence that says what was wrong, where, and what to do. The command line prints it
    alone and exits with status 2; libraries may catch it as a ``ValueError``.
    """
