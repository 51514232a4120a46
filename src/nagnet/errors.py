"""The one exception a command line user should ever see."""


class UserError(ValueError):
    """Bad input: one line that names the thing and the remedy.

    Commands print the message and exit with code 2. Library callers can catch it as a ``ValueError``.
    """
