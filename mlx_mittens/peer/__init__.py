"""MLX's own Metal kernels, launched beside ours: in the simulator, on NVIDIA GPUs, and through Mesa's compiler."""
