"""``python -m mlx_mittens`` is the command ``mlx-mittens``."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
