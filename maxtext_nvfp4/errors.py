"""The exceptions that the command line reports by their message alone."""


class ConfigError(Exception):
    """A configuration that cannot be honoured.

    The message says what was given, why it cannot be, and what to write instead. It is deliberately
    not a `ValueError`: pydantic would wrap it, and MaxText's config loader would hide its text. The
    command line prints the message alone and exits with status 2.
    """


class TrainingError(Exception):
    """A run that ended itself before its last step, for a reason that is no mistake in its configuration.

    The command line prints the message alone and exits with status 3.
    """


STOPPED_STATUS = "MAXTEXT_NVFP4_STOPPED_STATUS"
"""Environment variable with the exit status of a run that SIGTERM stopped. A process whose run stopped because another one
got the signal can tell it by nothing else from a run that is complete."""
