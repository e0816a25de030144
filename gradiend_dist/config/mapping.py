"""From the keys that a user writes, in Python or in a file, to dataclasses; a misspelt key is told with its nearest."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import Any

from gradiend_dist.config.checks import check_path
from gradiend_dist.config.documents import DocumentError, parse_json, parse_yaml, read_text
from gradiend_dist.errors import UserError

# Arguments of the reference that have no meaning here, with what to do instead. A user who brings a working
# configuration over should learn that from one line, not from a guess at a typo.
NOT_SUPPORTED = {
    "precompute_gradient_batches": "gradients are computed once and kept, see gradient_store_gib",
    "precompute_gradient_buffer_size": "gradients are computed once and kept, see gradient_store_gib",
    "gradient_timing_steps": "step times are always written to training.json",
    "runtime_monitor": "step times are always written to training.json",
    "runtime_monitor_interval": "step times are always written to training.json",
    "runtime_monitor_system_stats": "step times are always written to training.json",
    "lr_search_config": "there is no learning-rate search; pass a number as learning_rate",
    "model_use_cache": "the key/value cache is never used for gradients",
    "base_model_device_map": "use device_base_model, or launch on several processes",
    "base_model_max_memory": "use device_base_model, or launch on several processes",
    "positive_class": "the first of target_classes is the positive one",
    "decoder_mlm_head_epochs": "the objective clm_mlm_head is not available",
    "decoder_mlm_head_batch_size": "the objective clm_mlm_head is not available",
    "decoder_mlm_head_lr": "the objective clm_mlm_head is not available",
    "decoder_mlm_head_max_size": "the objective clm_mlm_head is not available",
    "decoder_sequence_cloze_rhs_window": "the objective clm_sequence_cloze is not available",
    "split_resplit_per_seed": "splits are the same for every seed",
    "split_resplit_strategy": "splits are the same for every seed",
    "reuse_pre_prune": "the pruned space is computed once for all seeds",
    "highlight_non_convergence": "seeds that did not converge are always marked",
}


def from_mapping(kind: type, values: dict[str, Any], where: str) -> Any:
    """Build a dataclass from user-written keys; a misspelt key is an error that names the nearest one."""
    names = [item.name for item in dataclasses.fields(kind)]
    for key in values:
        if key not in names:
            raise UserError(f"{where}: {unknown_key(str(key), names)}")
    return kind(**values)


def unknown_key(key: str, names: list[str]) -> str:
    """The sentence for a key that no dataclass has."""
    if key in NOT_SUPPORTED:
        return f"{key} is an argument of the reference package that is not supported here: {NOT_SUPPORTED[key]}."
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    remedy = f"did you mean {near[0]}?" if near else "see --help for the known arguments."
    return f"{key} is not a known argument: {remedy}"


def read_config_file(path: str | Path) -> dict[str, Any]:
    """Read a YAML or JSON configuration; the file is data, never code."""
    check_path("--config", path)
    path = Path(path)
    if not path.is_file():
        raise UserError(f"--config {path} does not exist as a file: pass the path of a YAML or JSON file.")
    try:
        text = read_text(path)
        values = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except DocumentError as error:
        raise UserError(f"--config {path} cannot be read: {error}.") from error
    if not isinstance(values, dict):
        raise UserError(f"--config {path} holds no mapping: write one `name: value` per line.")
    return values
