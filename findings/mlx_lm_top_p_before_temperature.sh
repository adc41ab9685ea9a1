#!/usr/bin/env bash
# Behaviour: mlx-lm's samplers apply top-p and min-p to the probabilities at temperature 1, whatever the temperature is,
# and divide by the temperature afterwards. So at temperature 8 top-p 0.5 can leave one token where half of the tempered
# probability is three.
# Expected: temperature first, as in llama.cpp's default chain for sampling with it and in transformers.
source "$(dirname "${BASH_SOURCE[0]}")/in_new_environment.sh"
in_new_environment "mlx[cpu]==0.32.4" "mlx-lm==0.32.2" <<'PYTHON'
import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

mx.set_default_device(mx.cpu)
logprobs = mx.log(mx.array([[0.6, 0.3, 0.08, 0.02]]))
tempered = mx.softmax(logprobs / 8)[0].tolist()
kept = {make_sampler(temp=8.0, top_p=0.5)(logprobs).item() for _ in range(300)}
print("seen: probabilities at temperature 8:", [round(p, 2) for p in tempered], "- tokens drawn with top_p 0.5:", kept)
assert tempered[0] < 0.3 and kept == {0}
PYTHON
