"""Memory that a prompt needed goes back to the system before the first token after it."""

import inspect
import os
import platform
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_mittens as mm
from mlx_mittens import _ext


def attend(queries, keys=300):
    q, k = mx.zeros((1, 2, queries, 64)), mx.zeros((1, 2, keys, 64))
    mx.eval(mm.scaled_dot_product_attention(q, k, k, scale=0.1, stream=mx.cpu))


@pytest.mark.parametrize(("queries", "given_back"), [(300, 1), (128, 1), (127, 0), (2, 0)])
def test_the_first_token_after_a_long_prompt_gives_back(queries, given_back):
    attend(1)
    before = _ext.cpu_times_given_back()
    for _ in range(2):
        attend(queries)
    assert _ext.cpu_times_given_back() == before, "the prompt may go on"
    for _ in range(3):
        attend(1)
    assert _ext.cpu_times_given_back() == before + given_back


@pytest.mark.parametrize(("keys", "given_back"), [(513, 1), (512, 0), (514, 0), (1, 0)])
def test_so_does_the_token_after_one_for_which_caches_grew(keys, given_back):
    attend(1)
    before = _ext.cpu_times_given_back()
    for _ in range(2):
        attend(1, keys)
    assert _ext.cpu_times_given_back() == before, "other layers may move their keys yet"
    for _ in range(2):
        attend(1, keys + 1)
    assert _ext.cpu_times_given_back() == before + given_back


def test_a_converted_model_gives_back_what_joining_took():
    model = nn.Sequential(nn.Linear(8, 8))
    joined = mx.full((1 << 18,), 1.0)
    mx.eval(model.parameters(), joined)
    mx.synchronize()
    before = _ext.cpu_times_given_back()
    del joined
    mm.nn.convert(model)
    assert _ext.cpu_times_given_back() == before + 1 and mx.get_cache_memory() < 1 << 18


# malloc takes all from its heaps here and never trims them by itself: freed memory stays resident until it is asked.
HELD = f"""
import mlx.core as mx
import mlx_mittens as mm
{inspect.getsource(attend)}
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
attend(1)
held = [mx.full((1 << 20,), i, mx.float32, stream=mx.cpu) for i in range(32)]
mx.eval(held)
small = mx.full((1 << 10,), 1.0, stream=mx.cpu)
mx.eval(small)
del held
mx.clear_cache()
full = resident()
attend(1)
assert full - resident() < 8 << 20
attend(200)
attend(1)
print(full - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps what was freed, and can give it back")
def test_the_pages_go_back():
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
    environment["MLX_MITTENS_CALIBRATION"] = "off"
    done = subprocess.run([sys.executable, "-c", HELD], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100 << 20
