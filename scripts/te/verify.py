"""Imports Transformer Engine for JAX and prints the versions of what it loaded.

python verify.py                      as on a machine with an NVIDIA driver
python verify.py --stub LIBCUDA       without one, over the stand-in for it
python verify.py --gpu                JAX must see a GPU, too
"""

import argparse
import ctypes
import os
from importlib import metadata


def dotted(number: int) -> str:
    """A version such as 23203 as 2.32.3."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def main() -> None:
    """Prints one line a library, or raises what the import raised."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stub")
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()

    if options.stub:
        ctypes.CDLL(options.stub, ctypes.RTLD_GLOBAL)
    # Transformer Engine finds its other libraries in their wheels, but not this one.
    nccl_file = next(f for f in metadata.files("nvidia-nccl-cu13") or () if f.name == "libnccl.so.2")
    nccl = ctypes.CDLL(str(nccl_file.locate()), ctypes.RTLD_GLOBAL)
    if not options.gpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

    import jax
    import transformer_engine.jax  # noqa: F401
    import transformer_engine_jax

    # Transformer Engine has loaded cuBLAS; a name without a folder finds that one.
    cublas = ctypes.CDLL("libcublasLt.so.13")
    cublas.cublasLtGetVersion.restype = ctypes.c_size_t
    nccl_version = ctypes.c_int()
    nccl.ncclGetVersion(ctypes.byref(nccl_version))
    devices = jax.devices("gpu" if options.gpu else "cpu")
    for name, version in {
        "Transformer Engine": metadata.version("transformer-engine-jax"),
        "cuDNN": dotted(transformer_engine_jax.get_cudnn_version()),
        "cuBLAS": dotted(cublas.cublasLtGetVersion()),
        "NCCL": dotted(nccl_version.value),
        "JAX": f"{jax.__version__} on {len(devices)} x {devices[0].device_kind}",
    }.items():
        print(f"  {name:<20}{version}")


if __name__ == "__main__":
    main()
