"""Loading a base language model and its tokenizer; what its configuration says about it."""

from __future__ import annotations

import copy
import logging
from importlib.util import find_spec
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from gradiend_dist.config.documents import DocumentError, parse_json, read_text
from gradiend_dist.data.readers import as_local_path
from gradiend_dist.distributed.interrupt import stop_if_told
from gradiend_dist.errors import UserError, first_line
from gradiend_dist.model.config_check import (
    WHILE_BUILDING,
    building,
    check_config_file,
    check_sizes,
    one_at_a_time,
    reason,
)
from gradiend_dist.model.sharded import Cut, load_in_shards, reads_by_rows
from gradiend_dist.space import ParameterSpace

logger = logging.getLogger(__name__)

ADAPTER = "adapter_config.json"


def check_space_fits(space: ParameterSpace, base_model: nn.Module) -> None:
    """A GRADIEND model belongs to the base model whose weights it names."""
    parameters = dict(base_model.named_parameters())
    for weight in space.weights:
        found = parameters.get(weight.name)
        if found is None or tuple(found.shape) != weight.shape:
            shape = "no such weight" if found is None else f"shape {tuple(found.shape)}"
            raise UserError(
                f"The GRADIEND model names {weight.name} of shape {weight.shape}, the base model has {shape}: "
                "pass the base model that it was trained on."
            )


def load_base_model(
    path: str,
    *,
    torch_dtype: str = "float32",
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    device: torch.device | None = None,
    cut: Cut | None = None,
) -> tuple[nn.Module, Any]:
    """The base model with the head it was built for, and its tokenizer; `auto` is the dtype that it is stored in.

    On `device` at once: there is no copy on the host that is not the file itself. With `cut`, in the shards that it
    makes: all ranks call this, and each reads its own rows alone; a model that cannot be read so comes back whole.
    """
    adapted = adapted_model(path)
    if adapted is not None:
        given: dict[str, Any] = {
            "torch_dtype": torch_dtype,
            "attn_implementation": attn_implementation,
            # What will be cut over the ranks is merged on the host: whole it may not fit a device.
            "device": device if cut is None else None,
        }
        return _merged(path, *load_base_model(adapted, trust_remote_code=trust_remote_code, **given))
    if trust_remote_code:
        logger.warning("trust_remote_code=true: code that comes with %s runs on this machine with your rights", path)
    config = load_base_config(path, trust_remote_code=trust_remote_code)
    tokenizer = _load_tokenizer(path, trust_remote_code)
    options: dict[str, Any] = {
        "dtype": torch_dtype if torch_dtype == "auto" else getattr(torch, torch_dtype),
        "trust_remote_code": trust_remote_code,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # told below, by name
    }
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    try:
        with one_at_a_time:
            model, report = _read(path, config, tokenizer, cut, device, options)
    except SafetensorError as error:
        raise UserError(f"A weight file of model={path!r} is damaged ({error}): copy or download it again.") from error
    except UnpicklingError as error:
        raise UserError(
            f"A weight file of model={path!r} is a pickle with more than tensors in it, or damaged, and was not run: "
            "pass a copy that is saved as safetensors."
        ) from error
    except (*WHILE_BUILDING, EOFError) as error:
        raise UserError(f"model={path!r} cannot be loaded: {first_line(error)}") from error
    stop_if_told()
    _require_all_weights(path, [*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])])
    num_known = model.get_input_embeddings().num_embeddings
    if max(tokenizer.get_vocab().values()) >= num_known:
        raise UserError(
            f"The tokenizer of model={path!r} has {len(tokenizer)} tokens and the model embeddings for {num_known}: "
            "save them together, or resize the model's embeddings."
        )
    return model.eval(), tokenizer


def _read(
    path: str, config: Any, tokenizer: Any, cut: Cut | None, device: torch.device | None, options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The model, and what transformers says about its loading. With `cut`, all ranks call this."""
    if cut is not None:
        skeleton = skeleton_of(config, path, tokenizer, trust_remote_code=options["trust_remote_code"])
        if reads_by_rows(skeleton):
            return load_in_shards(skeleton, path, config, cut, device_map={"": device}, **options)
        device = None  # whole it may not fit there: it will be cut on the host, layer by layer
    model, report = _kind_of(config, tokenizer).from_pretrained(path, config=config, device_map=device, **options)
    return model, report


def adapted_model(path: str) -> str | None:
    """The base model of a directory that PEFT has written; None: it is none."""
    local = as_local_path(path, "model")
    if local is None or not (local / ADAPTER).is_file():
        return None
    try:
        values = parse_json(read_text(local / ADAPTER))
    except DocumentError as error:
        raise UserError(f"model={path!r}: {ADAPTER} cannot be read: {error}.") from error
    name = values.get("base_model_name_or_path") if isinstance(values, dict) else None
    if find_spec("peft") is None or not name:
        remedy = "install peft" if name else "name its base_model_name_or_path there"
        raise UserError(
            f"model={path!r} holds an adapter of PEFT and no model: {remedy}, or merge it (merge_and_unload) and save "
            "the result."
        )
    return str(name)


def skeleton_of(config: Any, name: str, tokenizer: Any, *, trust_remote_code: bool = False) -> nn.Module:
    """The model of a configuration, without memory for its weights."""
    kind = _kind_of(config, tokenizer)
    with building(f"model={name!r}"), torch.device("meta"):
        skeleton: nn.Module = kind.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)
    return skeleton


def _kind_of(config: Any, tokenizer: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    return AutoModelForCausalLM if is_causal(config, tokenizer) else AutoModelForMaskedLM


def _merged(path: str, model: Any, tokenizer: Any) -> tuple[nn.Module, Any]:
    """With the adapter of this directory in its weights."""
    from peft import PeftModel

    try:
        merged: nn.Module = PeftModel.from_pretrained(model, path).merge_and_unload()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"The adapter in model={path!r} cannot be merged: {first_line(error)}") from error
    return merged.eval(), tokenizer


def load_base_config(path: str, *, trust_remote_code: bool = False) -> Any:
    """The configuration of a base model that can be trained on."""
    from transformers import AutoConfig

    path = adapted_model(path) or path
    local = as_local_path(path, "model")
    if local is not None and not (local / "config.json").is_file():
        raise UserError(f"model={path!r} holds no config.json: pass the directory of a saved model, or a hub id.")
    if local is not None:
        check_config_file(local / "config.json", f"model={path!r}")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except WHILE_BUILDING as error:
        raise UserError(f"model={path!r} cannot be loaded: {reason(error)}") from error
    check_sizes(config, f"model={path!r}")
    if config.is_encoder_decoder:
        raise UserError(f"model={path!r} is an encoder-decoder model: pass a masked or a causal one.")
    rounded = next((found for part in (config, config.get_text_config()) if (found := _quantisation(part))), None)
    if rounded is not None:
        raise UserError(
            f"model={path!r} is quantised ({rounded}), and rounded weights have no gradients: pass the model "
            "that it was made from, with torch_dtype=bfloat16 where memory is short."
        )
    return config


def _quantisation(config: Any) -> str | None:
    """How the weights are rounded; older files name no method, but the way in which they were loaded."""
    settings = vars(config).get("quantization_config")
    if not settings:
        return None
    values = settings if isinstance(settings, dict) else vars(settings)
    loaded = (name for name in ("load_in_4bit", "load_in_8bit") if values.get(name))
    return str(values.get("quant_method") or next(loaded, "by an unknown method"))


def _load_tokenizer(path: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except WHILE_BUILDING as error:  # a damaged tokenizer.json gives any of them
        raise UserError(f"The tokenizer of model={path!r} cannot be loaded: {first_line(error)}") from error
    # Without any file of a tokenizer, transformers makes one that knows its special tokens and nothing else.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise UserError(f"model={path!r} has no tokenizer beside it: save the tokenizer in the same directory.")
    return tokenizer


def _require_all_weights(path: str, unset: list[str]) -> None:
    """What a checkpoint lacks would be drawn at random, and its gradients would mean nothing."""
    if unset:
        raise UserError(
            f"model={path!r} has no weight that fits {min(unset)} ({len(unset)} in all): pass a complete language "
            "model whose config.json is its own."
        )


def is_causal(config: Any, tokenizer: Any) -> bool:
    built = built_causal(config)
    return tokenizer.mask_token is None if built is None else built


def built_causal(config: Any) -> bool | None:
    """What the model was built for, where its configuration tells."""
    architectures = config.architectures or []
    if any(name.endswith("ForMaskedLM") for name in architectures):
        return False
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        return True
    return None


def longest_input(model: nn.Module, tokenizer: Any) -> int:
    """Tokens that the model has positions for; RoBERTa's kind loses those up to the padding index."""
    limit = min(int(tokenizer.model_max_length), 10**9)
    positions = vars(model.config).get("max_position_embeddings") or vars(model.config).get("n_positions")
    if not positions:
        return limit
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            positions = module.num_embeddings - module.padding_idx - 1
    return min(limit, positions)
