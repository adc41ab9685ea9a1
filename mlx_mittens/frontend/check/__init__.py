"""Checks Metal: finds what a Mac's compiler would refuse although clang takes it."""
