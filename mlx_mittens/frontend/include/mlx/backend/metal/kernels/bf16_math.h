// In place of MLX's header of this name, which gives bfloat the functions of Metal's compiler: our library has them for bfloat.
