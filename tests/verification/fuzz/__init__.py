"""Differential fuzzing: random calls of every op, compared with float64 and with mx.

    PYTHONPATH=tests python -m fuzz --cases 300                          300 cases of each subject, natively
    PYTHONPATH=tests python -m fuzz --op softmax --seed 1 --case 17      one case, replayed
    PYTHONPATH=tests python -m fuzz --nightly --jobs 2 --write           the nightly run, and bench/results/fuzz.md

A case is a function of its subject, executor, seed and index alone. Subjects are the ops and, beside them, what no
single op has: bad input, errors under the patch, bytes of GGUF, updates in place, threads, and memory.
"""
