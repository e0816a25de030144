"""argparse that ends in one line, for commands that must start fast: `flags` imports transformers, which takes long."""

from __future__ import annotations

import argparse
from typing import NoReturn

from gradiend_dist.errors import UserError


class PlainParser(argparse.ArgumentParser):
    """argparse that tells what is wrong as any other wrong input is told."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message.rstrip(".") + ": see --help.")
