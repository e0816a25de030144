"""Flags and configuration files -> dataclasses, through HfArgumentParser.

A configuration file holds the same names as the flags; flags win. What is misspelt, of a wrong type or twice the same
is an error in one line.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from gradiend_dist.commands.plain_parser import PlainParser
from gradiend_dist.config.checks import choices_of, is_union, require, shown
from gradiend_dist.config.documents import DocumentError, parse_yaml
from gradiend_dist.config.fields import NO_FLAG, flag_type
from gradiend_dist.config.foreign import (
    OF_TRAINING,
    RENAMED,
    from_hugging_face,
    require_default,
    require_one_process,
    unknown_key,
)
from gradiend_dist.config.mapping import read_config_file
from gradiend_dist.errors import UserError

EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


class CommandParser(PlainParser, HfArgumentParser):
    """HfArgumentParser that takes `null` for optional values, YAML for structured ones, and speaks in one line."""

    def __init__(self, groups: dict[str, Any], **options: Any) -> None:
        for title, kind in groups.items():
            kind._argument_group_name = title
        super().__init__(list(groups.values()), formatter_class=OneLinePerFlag, allow_abbrev=False, **options)

    @staticmethod
    def _parse_dataclass_field(parser: argparse.ArgumentParser, field: dataclasses.Field) -> None:
        kind = flag_type(field, field.type)
        if kind is NO_FLAG:
            return
        field = copy.copy(field)  # as the flag is; Hugging Face hands all metadata on to argparse
        shown = {name: value for name, value in field.metadata.items() if name in ("help", "aliases")}
        field.type, field.metadata = kind, types.MappingProxyType(shown)
        convert = converter(kind)
        if convert is None:
            HfArgumentParser._parse_dataclass_field(parser, field)
            negation = parser._option_string_actions.get(f"--no_{field.name}")
            if negation is not None:
                negation.help = argparse.SUPPRESS  # it works, but --help says everything once
            return
        default = None if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        help_text = field.metadata.get("help")
        flags = dict.fromkeys([f"--{field.name}", f"--{field.name.replace('_', '-')}"])
        parser.add_argument(*flags, type=convert, default=default, help=help_text, metavar=convert.__name__.upper())

    def names(self) -> list[str]:
        return [action.dest for action in self._actions if action.dest not in ("help", "config")]

    def parse(self, argv: Sequence[str], *, reads_config: bool = True) -> argparse.Namespace:
        """Defaults, then the file that --config names, then the flags."""
        self.print_help_if_asked(argv)
        before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        before.add_argument("--config")
        config = before.parse_known_args(argv)[0].config
        if config is not None and reads_config:
            self._take_defaults_from(read_config_file(config), config)
        values, unknown = self.parse_known_args([_renamed(word) for word in argv])
        self._require_known(unknown)
        return values

    def _require_known(self, unknown: Sequence[str]) -> None:
        """Flags that are none here may be those of others, at their defaults."""
        words = list(unknown)
        while words:
            flag = words.pop(0)
            require(flag.startswith("--"), f"{flag!r} is no flag and belongs to none: see --help.")
            name, _, value = flag.removeprefix("--").partition("=")
            name = name.replace("-", "_")
            if name not in OF_TRAINING:
                raise UserError(f"--{name}: {unknown_key(name, self.names())}")
            if "=" not in flag and words and not words[0].startswith("--"):
                value = words.pop(0)
            require_default(f"--{name}", structured(value or "true"), OF_TRAINING[name])

    def print_help_if_asked(self, argv: Sequence[str]) -> None:
        if "-h" in argv or "--help" in argv:
            self.print_help()
            self.exit(0)

    def _take_defaults_from(self, values: dict[str, Any], path: str) -> None:
        actions: dict[str, argparse.Action] = {}
        for action in self._actions:
            if action.dest != "help":
                actions.setdefault(action.dest, action)  # the first one: --no_NAME of a switch is its second
        for name, value in from_hugging_face(values).items():
            if name in OF_TRAINING:
                require_default(f"--config {path}: {name}", value, OF_TRAINING[name])
                continue
            if name not in actions or name == "config":
                raise UserError(f"--config {path}: {unknown_key(str(name), self.names())}")
            self.set_defaults(**{name: from_yaml(actions[name], value, path)})


def _renamed(word: str) -> str:
    """A flag that users know by another name."""
    if word.replace("-", "_").startswith("__per_device_train_batch_size"):
        require_one_process()
    name, equals, value = word.removeprefix("--").partition("=")
    known = RENAMED.get(name.replace("-", "_")) if word.startswith("--") else None
    return word if known is None else f"--{known}{equals}{value}"


def from_yaml(action: argparse.Action, value: Any, path: str) -> Any:
    """A value of a configuration file as the flag would have read it."""
    if value is None:
        takes_null = isinstance(action.type, types.FunctionType) and action.type is not number_or_word
        if action.default is None or takes_null:
            return None
        raise UserError(f"--config {path}: {action.dest} is empty: write a value, or leave the line out.")
    convert = string_to_bool if action.nargs == 0 else action.type  # a bare flag (--dry_run) has no type
    assert callable(convert), f"{action.dest} has a type"
    try:
        if action.nargs == "+":
            if not isinstance(value, list):
                raise TypeError("a list is expected")
            if None in value:
                raise TypeError("null is none of its items")
            return [convert(_as_text(convert, item)) for item in value]
        if convert is structured or (convert is string_to_bool and isinstance(value, bool)):
            return value
        if isinstance(value, list | dict):
            raise TypeError("one value is expected")
        return convert(_as_text(convert, value))
    except (TypeError, ValueError, OverflowError, argparse.ArgumentTypeError) as error:
        raise UserError(
            f"--config {path}: {action.dest}={shown(value)} cannot be read ({error}): see --help."
        ) from error


def _as_text(convert: Callable[[str], Any], value: Any) -> str:
    """What the user wrote. YAML takes the words yes, no, on and off for switches, also where they name a class."""
    if isinstance(value, bool) and convert.__name__ == "str":
        raise TypeError("a text is expected: put it in quotes")
    return str(value)


def with_numbers(values: dict[str, Any]) -> dict[str, Any]:
    """YAML takes 1e-3, without a point, for a text; here it is a number, as it is at the top of a configuration."""
    return {key: float(v) if isinstance(v, str) and EXPONENT.fullmatch(v) else v for key, v in values.items()}


def converter(annotation: Any) -> Callable[[str], Any] | None:
    """How to read a flag of this type; None where Hugging Face's parser does it."""
    # A word that is none of the choices is told by name when the arguments are checked, from files and Python as well.
    if choices_of(annotation):
        return optionally(str) if is_union(annotation) else str
    parts = typing.get_args(annotation) if is_union(annotation) else (annotation,)
    plain = [part for part in parts if part is not type(None)]
    optional = len(plain) < len(parts)
    if len(plain) == 1 and plain[0] in (int, float, str):
        return optionally(plain[0]) if optional else None
    if set(plain) == {float, str}:
        return number_or_word
    if len(plain) == 1 and (plain[0] is bool and not optional or typing.get_origin(plain[0]) is list):
        item = typing.get_args(plain[0])
        return structured if item and typing.get_origin(item[0]) is list else None
    return structured


def optionally(kind: type) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        return None if text.lower() in ("none", "null") else kind(text)

    convert.__name__ = kind.__name__  # argparse names it in its messages
    return convert


def number_or_word(text: str) -> float | str:
    """1e-5 or auto; whatever is neither is told by name when the arguments are checked."""
    try:
        return float(text)
    except ValueError:
        return text


number_or_word.__name__ = "float"


def structured(text: str) -> Any:
    """A flag with structure is written as YAML: --pre_prune_config '{topk: 0.01, n_samples: 16}'."""
    try:
        return parse_yaml(text)
    except DocumentError as error:
        raise argparse.ArgumentTypeError(f"no valid YAML: {text[:80]!r}") from error


structured.__name__ = "yaml"


class OneLinePerFlag(argparse.ArgumentDefaultsHelpFormatter):
    """One spelling of each flag and a short type, where argparse prints every spelling with its own capitals."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=42, width=118)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False, {}) else super()._get_help_string(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or isinstance(action, argparse._HelpAction):
            return super()._format_action_invocation(action)
        kind = action.metavar or getattr(action.type, "__name__", "")
        kind = "BOOL" if action.type is string_to_bool else str(kind).upper()
        values = f"{kind} ..." if action.nargs == "+" else kind
        return f"{action.option_strings[0]} {values}".rstrip()

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:  # noqa: ARG002
        return f"usage: {self._prog} [--config FILE] [--FLAG VALUE ...]\n\n"
