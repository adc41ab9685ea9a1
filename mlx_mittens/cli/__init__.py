"""The command line: a module a command, and what they share."""
