"""The one exception for mistakes a user can fix."""


class ConfigError(Exception):
    """A configuration that cannot be honoured.

    The message says what was given, why it cannot be, and what to write instead. It is deliberately
    not a `ValueError`: pydantic would wrap it, and MaxText's config loader would hide its text. The
    command line prints the message alone and exits with status 2.
    """
