"""The error that users read."""


class KieloError(Exception):
    """An error that the user can put right. The message names the key, file, line or rank, and what works.

    `kielo` prints the message without a traceback and exits 1.
    """
