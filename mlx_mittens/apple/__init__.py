"""Apple GPUs without a Mac: machine code, registers and predicted time."""
