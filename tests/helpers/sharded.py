"""One rank of models sharded with mx.distributed; the first prints a line of JSON for each, for test_distributed.py."""

import json
import pathlib
import sys

import mlx.core as mx
from mlx_lm.utils import load_model

import mlx_mittens as mm
from helpers import tiny

backend, prompt, count, *folders = sys.argv[1:]
group = mx.distributed.init(backend=backend)
for folder in folders:
    model, _ = load_model(pathlib.Path(folder))
    if group.size() > 1:
        model.shard(group)
    mm.stats(reset=True)
    with mm.patched():
        tokens = tiny.tokens(model, json.loads(prompt), int(count))
    if group.rank() == 0:
        ran = {op: sum(counts["kernels"].values()) for op, counts in mm.stats().items()}
        print(json.dumps({"size": group.size(), "tokens": tokens, "ran": ran}))
