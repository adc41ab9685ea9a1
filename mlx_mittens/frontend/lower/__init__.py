"""Changes LLVM's text, PTX and SPIR-V where clang's C++ differs from Metal or a target lacks something."""
