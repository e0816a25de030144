"""What can be wrong with a base model's config.json, found before a weight is loaded and before hours go by.

Transformers takes a configuration for what it says: it divides by a number of heads of 0, asks a list for its name, and
builds a million layers, each with the error of whichever line comes first.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from gradiend_dist.config.checks import shown
from gradiend_dist.config.documents import DocumentError, parse_json, read_text
from gradiend_dist.errors import UserError, first_line

# What a constructor of transformers raises for values that it did not expect: it checks few of them.
WHILE_BUILDING = (
    StrictDataclassError, OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError,
    ImportError, RuntimeError,
)  # fmt: skip

# Under their general names; a configuration class maps them to its own.
SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "max_position_embeddings", "head_dim",
)  # fmt: skip

LAYERS = re.compile(r"layers?$|blocks?$|groups?$|experts?$")

# Of one kind, at most: before they are built they stand in lists.
MOST_LAYERS = 10_000

# Of one model, at most. Each takes 0.05 ms; the largest models that are published have 60,000.
MOST_MODULES = 100_000

LARGEST_NUMBER = 2**53

# While it loads or builds a model, transformers switches torch's initializers and default dtype for the whole process:
# two threads at once leave each other models with weights that are missing.
one_at_a_time = threading.RLock()


def check_config_file(path: Path, model: str) -> None:
    """A config.json that is there: an object whose entries have the types that they must have."""
    try:
        values = parse_json(read_text(path))
    except DocumentError as error:
        raise UserError(f"The config.json of {model} cannot be read: {error}.") from error
    check_values(values, model)


def check_values(values: Any, model: str) -> None:
    """Of a config.json; what stands in it below a key is looked at as well."""
    if not isinstance(values, dict):
        raise UserError(f"The config.json of {model} is no JSON object: pass the directory of a saved model.")
    if not isinstance(values.get("model_type", ""), str):
        _refuse(model, "model_type", values["model_type"], "a text")
    architectures = values.get("architectures")
    if architectures is not None and not _is_list_of(architectures, str):
        _refuse(model, "architectures", architectures, "a list of names")
    for name in ("dtype", "torch_dtype"):
        if not isinstance(values.get(name), str | dict | None):
            _refuse(model, name, values[name], "the name of a dtype")
    for name, value in _numbers(values):
        if LAYERS.search(name) and value > MOST_LAYERS:
            _refuse(model, name, value, f"at most {MOST_LAYERS}")
        if abs(value) > LARGEST_NUMBER:
            _refuse(model, name, value, "a size of anything")


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif isinstance(value, int):
            yield name, value


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _refuse(model: str, name: str, value: Any, wanted: str) -> None:
    raise UserError(f"The config.json of {model} has {name}={shown(value)}, which is not {wanted}: correct it.")


def check_sizes(config: Any, model: str) -> None:
    """The sizes that every language model has are whole numbers above 0, or lists of them with one for each layer."""
    values = config.get_text_config().to_dict()
    for general in SIZES:
        name = config.attribute_map.get(general, general)
        value = values.get(name)
        sizes = value if isinstance(value, list) else [value]
        if value is not None and not (_is_list_of(sizes, int) and all(size > 0 for size in sizes)):
            _refuse(model, name, value, "a whole number above 0")


def reason(error: BaseException) -> str:
    """What an error of `WHILE_BUILDING` says, in one line; one on a field names it in the first and tells in others."""
    return " ".join(str(error).split())[:300] + "." if isinstance(error, StrictDataclassError) else first_line(error)


@contextlib.contextmanager
def building(model: str) -> Iterator[None]:
    """In this block something is made from a configuration; that it cannot be is told in one line, in bounded time."""
    left = MOST_MODULES

    def count(_module: nn.Module, _name: str, _child: nn.Module | None) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise UserError(f"The config.json of {model} describes more than {MOST_MODULES:,} modules: correct it.")

    with one_at_a_time:
        handle = register_module_module_registration_hook(count)
        try:
            yield
        except UserError:
            raise
        except WHILE_BUILDING as error:
            raise UserError(f"{model} is no language model that can be built: {reason(error)}") from error
        finally:
            handle.remove()


def check_files_hold(path: Path, num_weights: int, model: str) -> None:
    """The weight files are large enough for so many weights, at one bit for each; else memory is filled in vain."""
    files = [file for pattern in ("*.safetensors", "*.bin") for file in path.glob(pattern)]
    num_bytes = sum(file.stat().st_size for file in files)
    if 0 < 8 * num_bytes < num_weights:  # an empty file is told when it is read
        raise UserError(
            f"The config.json of {model} describes {num_weights:,} weights, and its files of {num_bytes:,} bytes "
            "cannot hold them: pass a complete model whose config.json is its own."
        )
