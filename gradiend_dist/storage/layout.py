"""The name of every file and directory that a run leaves behind, once."""

from __future__ import annotations

# A model directory, in the reference's format (see model_dir.py).
WEIGHTS = "model.safetensors"
MODEL_CONFIG = "config.json"
INDICES = "mapping_indices.safetensors"
MASKS = "mapping_masks.safetensors"
CONTEXT = "gradiend_context.json"
TRAINING = "training.json"
TOKENIZER = "tokenizer"
MODEL_FILES = (WEIGHTS, "pytorch_model.bin", MODEL_CONFIG, INDICES, MASKS)

# An experiment's directory: the promoted model, and a directory for each seed.
MODEL_DIR = "model"
SEEDS_DIR = "seeds"
SEED_DIR = "seed_{seed}"
SEED_METRICS = "metrics_seed_{seed}.jsonl"
STATE_DIR = "state"
SEED_STATE_DIR = "state_seed_{seed}"
RUN_CONFIG = "run_config.yaml"
METRICS = "metrics.jsonl"
STATS = "training_stats.json"
SEED_REPORT = "seed_report.json"
REPORT_PAGE = "report.html"
GRID_CACHE = "decoder_grid_cache.json"
GRID_POINTS = "decoder"
ROW_WISE_CSV = "decoder_row_wise_scores.csv"

# Who writes to it now: a whole run, or the tasks of an array, one for each seed.
RUN_LOCK = "run.lock"
SEED_LOCK = "run_seed_{seed}.lock"
RUN_LOCKS = "run*.lock"

# A saved state of training, and the file that a user touches to have one saved now.
STATE_RUN = "run.json"
STATE_SPACE = "space.safetensors"
STATE_COMPLETE = "complete.json"
STATE_PROGRESS = "progress.json"
STATE_ZERO = "zero"
STATE_ZERO_FACTS = "zero.json"
SAVE_TRIGGER = "SAVE_STATE"

# A rewritten model, or the change alone.
MODEL_CARD = "README.md"
DELTA_WEIGHTS = "delta.safetensors"
DELTA_FACTS = "delta.json"
