"""Measuring ops and whole models; the command is in `cli`."""
