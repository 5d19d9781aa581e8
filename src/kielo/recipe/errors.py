"""The one error that a user is meant to read."""


class KieloError(Exception):
    """Something the user can put right: the message names the key, file, line or rank, and what would work.

    `kielo` prints the message without a traceback and exits 1.
    """
