"""Loading a base language model and its tokenizer; what its configuration says about it."""

from __future__ import annotations

import logging
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from gradiend_dist.data.readers import as_local_path
from gradiend_dist.errors import UserError, first_line
from gradiend_dist.space import ParameterSpace

logger = logging.getLogger(__name__)


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
    path: str, *, torch_dtype: str = "float32", trust_remote_code: bool = False
) -> tuple[nn.Module, Any]:
    """The base model with the head it was built for, and its tokenizer; `auto` is the dtype that it is stored in."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    if trust_remote_code:
        logger.warning("trust_remote_code=true: code that comes with %s runs on this machine with your rights", path)
    config = load_base_config(path, trust_remote_code=trust_remote_code)
    tokenizer = _load_tokenizer(path, trust_remote_code)
    kind = AutoModelForCausalLM if is_causal(config, tokenizer) else AutoModelForMaskedLM
    try:
        loaded: Any = kind.from_pretrained(
            path,
            config=config,
            dtype=torch_dtype if torch_dtype == "auto" else getattr(torch, torch_dtype),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, by name
        )
    except SafetensorError as error:
        raise UserError(f"A weight file of model={path!r} is damaged ({error}): copy or download it again.") from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"model={path!r} cannot be loaded: {first_line(error)}") from error
    model, report = loaded
    _require_all_weights(path, [*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])])
    num_known = model.get_input_embeddings().num_embeddings
    if max(tokenizer.get_vocab().values()) >= num_known:
        raise UserError(
            f"The tokenizer of model={path!r} has {len(tokenizer)} tokens and the model embeddings for {num_known}: "
            "save them together, or resize the model's embeddings."
        )
    return model.eval(), tokenizer


def load_base_config(path: str, *, trust_remote_code: bool = False) -> Any:
    """The configuration of a base model that can be trained on."""
    from transformers import AutoConfig

    local = as_local_path(path, "model")
    if local is not None and not (local / "config.json").is_file():
        raise UserError(f"model={path!r} holds no config.json: pass the directory of a saved model, or a hub id.")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model={path!r} cannot be loaded: {first_line(error)}") from error
    if config.is_encoder_decoder:
        raise UserError(f"model={path!r} is an encoder-decoder model: pass a masked or a causal one.")
    return config


def _load_tokenizer(path: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, LookupError, TypeError) as error:  # a damaged tokenizer.json gives any of them
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
