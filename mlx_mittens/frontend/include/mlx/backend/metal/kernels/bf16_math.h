// In place of MLX's header of this name, which gives bfloat the functions of Metal's compiler: ours take bfloat already.
