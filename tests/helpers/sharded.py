"""One rank of a model sharded with mx.distributed; the first prints its tokens as JSON. Run by test_distributed.py."""

import json
import pathlib
import sys

import mlx.core as mx
from mlx_lm.utils import load_model

import mlx_mittens as mm
from helpers import tiny

backend, folder, prompt, count = sys.argv[1], pathlib.Path(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4])
group = mx.distributed.init(backend=backend)
model, _ = load_model(folder)
if group.size() > 1:
    model.shard(group)
with mm.patched():
    tokens = tiny.tokens(model, prompt, count)
if group.rank() == 0:
    ran = {op: sum(counts["kernels"].values()) for op, counts in mm.stats().items()}
    print(json.dumps({"size": group.size(), "tokens": tokens, "ran": ran}))
