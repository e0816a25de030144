"""The training command: accelerate launch -m gradiend_dist.train --config run.yaml [--FLAG VALUE ...]"""

import sys

from gradiend_dist.commands.train import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
