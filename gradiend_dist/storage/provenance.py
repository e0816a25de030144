"""What a run was made with: versions, commit, hardware, job; and never a secret."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

PACKAGES = (
    "gradiend_dist", "torch", "transformers", "accelerate", "deepspeed", "safetensors", "pandas", "numpy", "wandb",
)  # fmt: skip

# Of a Slurm job: who runs it and where, not its whole environment.
SLURM = ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT", "SLURM_JOB_NODELIST")

HIDDEN = "***"

# A tokenizer is none, however it is called.
SECRET_NAME = re.compile(r"token(?!i[sz])|secret|passw|api_?key|credential|private_?key", re.IGNORECASE)

SECRET_FORMS = (
    re.compile(r"(?<=://)[^/@\s]+(?=@)"),  # https://user:password@host
    re.compile(r"\b(?:hf_|sk-|ghp_|github_pat_|glpat-|AKIA)[A-Za-z0-9_-]{12,}"),
)

# Shorter values of such variables ("1", "true") are no secrets, and would blot out half a text.
SHORTEST_SECRET = 8


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # a source tree that is not installed
            found[name] = "unknown"
    return {"python": platform.python_version(), **found}


def git_hash() -> str:
    """The commit of the source tree, if this is one."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()


def hardware() -> dict[str, Any]:
    """Of this host."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "gpus": gpus,
        "cpu": platform.processor() or platform.machine(),
        "cpu_count": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "host": platform.node(),
    }


def job() -> dict[str, str]:
    return {name.lower(): os.environ[name] for name in SLURM if name in os.environ}


def without_secrets(value: Any, environment: Mapping[str, str] = os.environ) -> Any:
    """The same value with everything blotted out that is named or looks like a secret, or is one of the environment."""
    secrets = [
        text
        for name, text in environment.items()
        if (SECRET_NAME.search(name) or name.endswith("_KEY")) and len(text) >= SHORTEST_SECRET
    ]
    return _clean(value, sorted(secrets, key=len, reverse=True))


def _clean(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, dict):
        return {k: HIDDEN if _is_secret(k, v) else _clean(v, secrets) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item, secrets) for item in value]
    if not isinstance(value, str):
        return value
    for secret in secrets:
        value = value.replace(secret, HIDDEN)
    for form in SECRET_FORMS:
        value = form.sub(HIDDEN, value)
    return value


def _is_secret(name: Any, value: Any) -> bool:
    """`decoder_eval_ignore_tokens` is a list of words: only a text can be a secret."""
    return isinstance(value, str) and bool(SECRET_NAME.search(str(name)))
