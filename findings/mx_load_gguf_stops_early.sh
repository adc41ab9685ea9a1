#!/usr/bin/env bash
# Behaviour: mx.load of a .gguf file ends silently at the first tensor of a kind that its reader does not know (MXFP4,
# TQ1_0, ...). That tensor and all behind it are missing from the result. A tensor of a K kind comes back as float16.
# Expected: an error that names the tensor, as there is for IQ4_NL.
source "$(dirname "${BASH_SOURCE[0]}")/in_new_environment.sh"
in_new_environment "mlx[cpu]==0.32.4" "gguf==0.19.0" <<'PYTHON'
import gguf
import mlx.core as mx
import numpy as np

KINDS = gguf.GGMLQuantizationType
dense = np.arange(64, dtype=np.float32).reshape(2, 32)


def loaded(kind):
    packed = np.zeros((2, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    writer = gguf.GGUFWriter("file.gguf", "llama")
    writer.add_tensor("first", dense)
    writer.add_tensor("second", packed, raw_dtype=kind)
    writer.add_tensor("third", dense)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: str(value.dtype) for name, value in sorted(mx.load("file.gguf").items())}


for kind in (KINDS.MXFP4, KINDS.TQ1_0):
    print(f"seen: three tensors, the second {kind.name}:", loaded(kind))
    assert list(loaded(kind)) == ["first"]
print("seen: three tensors, the second Q4_K:", loaded(KINDS.Q4_K))
assert loaded(KINDS.Q4_K)["second"] == "mlx.core.float16"
PYTHON
