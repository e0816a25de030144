"""The apply command: a base model with a saved change, at any strength, as a plain Hugging Face model.

gradiend-dist apply DELTA --strength 0.5 --output_dir changed
"""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradiend_dist.commands.flags import CommandParser
from gradiend_dist.commands.process import Process
from gradiend_dist.commands.rewrite import print_card
from gradiend_dist.config.checks import require
from gradiend_dist.config.fields import documented
from gradiend_dist.errors import UserError
from gradiend_dist.model.base import load_base_model
from gradiend_dist.rewriting.card import as_dtype, check_output, save_rewritten
from gradiend_dist.rewriting.delta import Delta, load_delta

logger = logging.getLogger(__name__)


@documented
@dataclass(kw_only=True)
class ApplyOptions:
    """Which model, and how far."""

    output_dir: str | None = None
    """Directory of the changed model (required)."""
    strength: float = 1.0
    """1 is the change as it was made, 0.5 half of it, -1 the same the other way."""
    model: str | None = None
    """The base model, a path or hub id. None: the one that the change was made for."""
    dtype: str | None = None
    """float32, bfloat16, float16 or float64. None: that of the base model's files."""
    max_shard_size: str = "5GB"
    """Weights are saved in files of at most this size."""
    trust_remote_code: bool = False
    """Run code that comes with the base model."""


def main(argv: Sequence[str] | None = None) -> int:
    process = Process(
        "gradiend-dist apply",
        memory_remedy="run it where the base model fits in memory.",
        kept="stopped; nothing was written",
    )
    process.set_up_logging()
    try:
        delta, options = parse(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        return process.refuse(error)
    return process.run(lambda _: run(delta, options), timeout=600.0)


def parse(argv: Sequence[str]) -> tuple[Delta, ApplyOptions]:
    parser = CommandParser(
        {"what to do": ApplyOptions},
        prog="gradiend-dist apply DELTA",
        description="Save a base model with a change that rewrite --as delta has written.",
    )
    parser.print_help_if_asked(argv)
    require(
        len(argv) > 0 and not argv[0].startswith("-"),
        "DELTA is missing: pass the directory that rewrite --as delta has written first.",
    )
    values = vars(parser.parse(argv[1:]))
    options = ApplyOptions(**{item.name: values[item.name] for item in dataclasses.fields(ApplyOptions)})
    require(options.output_dir is not None, "output_dir is missing: pass --output_dir DIRECTORY.")
    require(math.isfinite(options.strength), f"strength={options.strength} is not finite: pass a number such as 0.5.")
    check_output(str(options.output_dir), options.dtype, options.max_shard_size)
    delta = load_delta(argv[0])
    for name, other in (("DELTA", argv[0]), ("model", options.model or delta.base_model)):
        require(
            Path(str(options.output_dir)).resolve() != Path(other).resolve(),
            f"output_dir={options.output_dir!r} is {name} itself: pass another directory.",
        )
    return delta, options


def run(delta: Delta, options: ApplyOptions) -> int:
    """Apply and save, in a single process: there is no other rank."""
    name, dtype = options.model or delta.base_model, as_dtype(options.dtype)
    delta.tell_other_base(name)
    model, tokenizer = load_base_model(name, torch_dtype="auto", trust_remote_code=options.trust_remote_code)
    changed = delta.apply(model, options.strength)
    changed = changed if dtype is None else changed.to(dtype)
    card = delta.change(changed, name, options.strength).card()
    save_rewritten(changed, tokenizer, str(options.output_dir), card, max_shard_size=options.max_shard_size)
    print_card(str(options.output_dir), "model")
    return 0


if __name__ == "__main__":
    sys.exit(main())
