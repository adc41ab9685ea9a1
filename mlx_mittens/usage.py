"""What the commands say about arguments that they cannot serve."""


class UsageError(Exception):
    """Arguments that cannot be served, with a message for people."""
