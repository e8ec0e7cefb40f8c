"""`python -m maxtext_nvfp4`."""

import sys

from maxtext_nvfp4.cli import main

if __name__ == "__main__":
    sys.exit(main())
