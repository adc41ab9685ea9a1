"""``python -m mlx_mittens`` is the command ``mlx-mittens``."""

import sys

from mlx_mittens_cli import main

if __name__ == "__main__":
    sys.exit(main())
