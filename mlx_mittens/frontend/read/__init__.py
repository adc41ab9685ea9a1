"""Reads Metal: the files, their tokens, and what stands where, before anything is changed."""
