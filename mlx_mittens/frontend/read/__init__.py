"""Reads Metal: the files, their tokens, and the place of each construct, before anything is changed."""
