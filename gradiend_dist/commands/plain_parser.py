"""argparse that ends in one line, for commands that must start fast: `flags` imports transformers, which takes long."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from gradiend_dist.config.checks import check_texts
from gradiend_dist.errors import UserError


class PlainParser(argparse.ArgumentParser):
    """argparse that tells what is wrong as any other wrong input is told."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        for text in args or ():
            check_texts("argument", text)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UserError(message.rstrip(".") + ": see --help.")
