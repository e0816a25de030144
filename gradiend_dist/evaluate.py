"""The evaluation command: accelerate launch -m gradiend_dist.evaluate RUN_DIR [--FLAG VALUE ...]"""

import sys

from gradiend_dist.commands.evaluate import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
