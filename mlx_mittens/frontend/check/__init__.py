"""Checks Metal: finds code that a Mac's compiler would refuse although clang takes it."""
