"""Multiplies with a tensor of a GGUF file, on the bytes as the file stores them: nothing is converted.

`python examples/gguf_matmul.py [FILE.gguf [TENSOR]]`. Without a file, one is written first, by the gguf package.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile

import gguf
import mlx.core as mx
import numpy as np

import mlx_mittens as mm

NAMES = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs")
KINDS = {gguf.GGMLQuantizationType[name.upper()]: name for name in (*NAMES, "mxfp4", "nvfp4")}
SAMPLES = (gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.MXFP4)


def write_sample(path: pathlib.Path) -> None:
    """A file with one random matrix, in several formats."""
    weights = np.random.default_rng().normal(size=(512, 1024)).astype(np.float32)
    writer = gguf.GGUFWriter(path, "llama")
    for kind in SAMPLES:
        writer.add_tensor(f"weights.{KINDS[kind]}", gguf.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def multiply(tensor: gguf.ReaderTensor) -> float:
    """Multiplies a random row with the tensor; the largest error against float64, relative to the largest result."""
    kind = KINDS[tensor.tensor_type]
    blocks = mx.array(tensor.data)  # [outputs, bytes of a row]
    weights = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
    x = np.random.default_rng().normal(size=(1, weights.shape[1])).astype(np.float32)

    y = mm.block_matmul(mx.array(x), blocks, kind)

    exact = x.astype(np.float64) @ weights.T
    error = float(np.abs(np.array(y) - exact).max() / np.abs(exact).max())
    outputs, columns = weights.shape
    print(f"{tensor.name}: {kind}, {outputs}x{columns}, {blocks.nbytes} bytes, error {error:.1e}")
    return error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=pathlib.Path)
    parser.add_argument("tensor", nargs="?", help="only this one")
    arguments = parser.parse_args()
    if arguments.file is not None and not arguments.file.is_file():
        parser.error(f"{arguments.file} is not a file")
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.file or pathlib.Path(folder) / "sample.gguf"
        if arguments.file is None:
            write_sample(path)
        tensors = [t for t in gguf.GGUFReader(path).tensors if t.tensor_type in KINDS and len(t.shape) == 2]
        if arguments.tensor is not None:
            tensors = [t for t in tensors if t.name == arguments.tensor]
        if not tensors:
            print(f"{path}: no matrix of {' or '.join(KINDS.values())} {arguments.tensor or ''}", file=sys.stderr)
            return 1
        return 0 if max(multiply(tensor) for tensor in tensors) < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
