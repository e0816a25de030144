"""The training command: accelerate launch -m gradiend_dist.train --config run.yaml [--FLAG VALUE ...]"""

import sys

from gradiend_dist.commands.start import main_of, run_process

__all__ = ["main"]

main = main_of("commands.train")

if __name__ == "__main__":
    sys.exit(run_process("gradiend-dist train", main))
