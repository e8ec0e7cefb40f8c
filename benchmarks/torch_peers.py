"""The peers written in PyTorch, as a program of their own: it runs in their environment and knows nothing of JAX.

    python torch_peers.py FOLDER [--compile]

FOLDER holds x.npy, bfloat16 [tokens, features] as uint16. The program prints one line of JSON, which names the peers that are
installed, their versions and their cases. Then it answers each line on its input with one on its output:

    time PEER CASE       the seconds of one call
    store PEER CASE      how many matrices it wrote to FOLDER, as PEER.CASE.0.npz, ...: codes and scales as in
                         `quantize_cases.Stored`

`--compile` adds each peer once more, by torch.compile, where there is a C++ compiler; the first call of a case compiles it.
"""

import argparse
import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

Quantizer = Callable[[torch.Tensor], Any]


def torchao() -> dict[str, Quantizer]:
    """Two levels of scales, to nearest. What its training recipe has beyond that is in Triton, for GPUs."""
    library = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")

    def nearest(x: torch.Tensor) -> Any:
        scales, codes = library.nvfp4_quantize(x, 16, library.per_tensor_amax_to_scale(x.abs().amax()))
        return ((codes, scales),)

    return {"nearest": nearest}


def fouroversix() -> dict[str, Quantizer]:
    """Its PyTorch reference, with the scale rule of plain NVFP4."""
    reference = importlib.import_module("fouroversix.quantize.pytorch.reference")
    utils = importlib.import_module("fouroversix.utils")
    matrix = importlib.import_module("fouroversix.quantize.utils").get_rht_matrix(device="cpu")

    def quantize(
        x: torch.Tensor, stochastic: bool = False, hadamard: bool = False, square: bool = False
    ) -> Any:
        codes, scales, _ = reference.quantize_to_fp4(
            x,
            had=matrix.to(x.dtype) if hadamard else None,
            round_style=utils.RoundStyle.stochastic if stochastic else utils.RoundStyle.nearest,
            scale_rule=utils.ScaleRule.static_6,
            block_scale_2d=square,
            transpose=hadamard,
            use_blackwell_scale_layout=False,
        )
        return codes, scales

    return {
        "nearest": lambda x: (quantize(x),),
        "stochastic": lambda x: (quantize(x, stochastic=True),),
        "square": lambda x: (quantize(x, square=True),),
        "hadamard": lambda x: (quantize(x, hadamard=True),),
        "hadamard_stochastic": lambda x: (quantize(x, stochastic=True, hadamard=True),),
        "both": lambda x: (quantize(x), quantize(x, hadamard=True)),
    }


def find(compiled: bool) -> tuple[dict[str, dict[str, Quantizer]], dict[str, str]]:
    """Quantizers and version of each peer that is installed."""
    peers: dict[str, dict[str, Quantizer]] = {}
    versions = {}
    for make in (torchao, fouroversix):
        try:
            cases = make()
        except ModuleNotFoundError:
            continue
        peers[make.__name__] = cases
        versions[make.__name__] = version(make.__name__)
        if compiled:
            peers[f"{make.__name__}-compiled"] = {case: torch.compile(run) for case, run in cases.items()}
    return peers, versions


def store(result: Any, square: bool, path: Path) -> int:
    """Writes the matrices of a result; returns how many."""
    for number, (packed, scales) in enumerate(result):
        bytes_ = packed.contiguous().view(torch.uint8).numpy()
        codes = np.stack([bytes_ & 15, bytes_ >> 4], axis=-1).reshape(len(bytes_), -1)
        values = scales.to(torch.float32).numpy().reshape(len(codes), -1)
        # A square block has its scale in each of its 16 rows.
        np.savez(f"{path}.{number}.npz", codes=codes, scales=values[::16] if square else values)
    return len(result)


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("folder", type=Path)
    options.add_argument("--compile", action="store_true")
    arguments = options.parse_args()
    peers, versions = find(arguments.compile and shutil.which(os.environ.get("CXX", "g++")) is not None)
    bits = np.load(arguments.folder / "x.npy")
    x = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    cases = {peer: list(quantizers) for peer, quantizers in peers.items()}
    print(json.dumps({"versions": {"torch": version("torch"), **versions}, "cases": cases}), flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            command, peer, case = line.split()
            start = time.perf_counter()
            result = peers[peer][case](x)
            answer: float = time.perf_counter() - start
            if command == "store":
                answer = store(result, case == "square", arguments.folder / f"{peer}.{case}")
            print(answer, flush=True)


if __name__ == "__main__":
    main()
