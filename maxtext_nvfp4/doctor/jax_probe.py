"""What JAX and Transformer Engine give a process of this environment, as a line of JSON. `doctor` runs it.

A process of its own: a wrong XLA_FLAGS or a broken CUDA installation ends the process that meets it.
"""

import json
import sys

import jax

from maxtext_nvfp4.backends import te_library


def main() -> None:
    """Prints platform, number of devices and why Transformer Engine cannot be used."""
    try:
        devices = jax.local_devices()
    except AssertionError:  # which says nothing
        sys.exit(f"JAX_PLATFORMS={jax.config.jax_platforms}: no such device, or its plug-in is not installed")
    answer = {"platform": devices[0].platform, "devices": len(devices), "engine": te_library.missing()}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
