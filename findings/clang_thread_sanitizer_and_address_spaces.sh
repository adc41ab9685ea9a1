#!/usr/bin/env bash
# Behaviour: clang's ThreadSanitizer does not instrument accesses through a pointer with an address space, and says nothing.
# trace-loads of -fsanitize-coverage sees them.
# Expected: both see every access, or a warning.
source "$(dirname "${BASH_SOURCE[0]}")/in_new_environment.sh"
in_new_environment "ziglang==0.15.2" <<'PYTHON'
import pathlib
import subprocess
import sys

pathlib.Path("access.cpp").write_text(
    "float plain(float* p) { return p[1]; }\n"
    "float spaced(__attribute__((address_space(1))) float* p) { return p[1]; }\n"
)


def calls(name, *flags):
    clang = [sys.executable, "-m", "ziglang", "c++", "-O1", "-S", "-emit-llvm", "-o", "out.ll", "access.cpp"]
    subprocess.run([*clang, *flags], check=True)
    bodies = pathlib.Path("out.ll").read_text().split("define ")[1:]
    return [name in next(body for body in bodies if function in body.split("{")[0]) for function in ("plain", "spaced")]


thread = calls("__tsan_read4", "-fsanitize=thread")
traced = calls("__sanitizer_cov_load4", "-fsanitize-coverage=trace-loads,trace-pc-guard")
print("seen: [plain pointer, address space 1] instrumented by thread:", thread, "- by trace-loads:", traced)
assert thread == [True, False] and traced == [True, True]
PYTHON
