"""Predicted times of launches on Apple GPUs: of ours, of a user's kernels, and of MLX's operations between them."""
