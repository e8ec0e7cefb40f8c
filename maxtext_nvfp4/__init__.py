"""NVFP4 4-bit pretraining for MaxText.

In a MaxText YAML: `quantization: nvfp4`. In a script of one's own: `register()` before using MaxText. The
numerics stand alone: `quantize`, `dequantize`, `random_hadamard` and `dot_general` need no MaxText.
"""

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.functional import dot_general
from maxtext_nvfp4.hadamard import random_hadamard
from maxtext_nvfp4.integration import register
from maxtext_nvfp4.integration.step import training_step
from maxtext_nvfp4.quantize import Quantized, dequantize, quantize

__all__ = [
    "ConfigError",
    "Quantized",
    "dequantize",
    "dot_general",
    "quantize",
    "random_hadamard",
    "register",
    "training_step",
]
