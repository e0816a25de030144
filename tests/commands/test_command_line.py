"""The command line: one set of names for flags, configuration files and Python, and what `--dry_run` and re-runs do."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tiny
import transformers
import yaml

import gradiend_dist
import gradiend_dist.trainer.text_prediction as trainer_module
import gradiend_dist.training.inputs as inputs_module
from gradiend_dist import PrePruneConfig, TextPredictionTrainer, TrainingArguments, UserError, __main__
from gradiend_dist.commands import train
from gradiend_dist.config.pruning import PostPruneConfig
from gradiend_dist.data.config import TextPredictionConfig

# Every flag of the training command. A new one is a promise to users: add it here, and to the documentation.
FLAGS = """
config dry_run

model data hf_dataset hf_subset hf_splits dataset_trust_remote_code run_id target_classes all_classes masked_col
label_col label_class_col alternative_col alternative_class_col use_class_names_as_columns split_col split_group_col
split_train_ratio split_val_ratio split_test_ratio max_counterfactuals_per_sentence random_state eval_neutral_data
eval_neutral_additional_excluded_words eval_neutral_max_rows second_neutral_data img_format img_dpi

add_identity_for_other_classes class_merge_map class_merge_transition_groups mask_placeholder

params prediction_objective latent_dim activation_encoder activation_decoder bias_decoder torch_dtype bf16 fp16
trust_remote_code gradient_checkpointing attn_implementation tf32
device device_encoder device_decoder device_base_model encoder_decoder_same_device
offload ddp_timeout use_cached_gradients gradient_store_gib

source target train_batch_size base_gradient_batch_size base_micro_batch_size gradiend_batch_size
gradient_accumulation_steps train_max_size max_length num_train_epochs max_steps
initialization spectral_items learning_rate lr_scheduler_type
warmup_steps warmup_ratio weight_decay adam_beta1 adam_beta2 adam_epsilon optim moments_dtype triton_kernels
max_grad_norm supervised_encoder supervised_decoder normalize_gradiend

decoder_eval_targets decoder_eval_restrict_to_target_classes decoder_eval_prob_on_other_class
decoder_eval_export_row_wise_csv decoder_eval_ignore_tokens decoder_eval_lms_max_samples decoder_eval_lrs
decoder_eval_feature_factors decoder_eval_max_size_training_like decoder_eval_max_size_neutral

do_eval eval_strategy eval_steps eval_batch_size encoder_eval_train_max_size encoder_eval_max_size encoder_eval_balance
include_other_classes seed_selection_eval_max_size

seed max_seeds min_convergent_seeds convergent_metric convergence_metric convergent_score_threshold
convergence_threshold convergent_mean_by_class_threshold seeds_in_parallel seed_runs_dir keep_seed_runs saved_seed_runs
fail_on_non_convergence seed_stability_topk seed_stability_part analyze_seed_stability
only_seed select_only

report_to run_name wandb_project wandb_entity wandb_group wandb_tags wandb_notes wandb_seed_runs wandb_log_model

pre_prune_config post_prune_config compat metadata

experiment_dir output_dir use_cache save_strategy save_steps save_total_limit resume save_only_best delete_models
logging_steps
""".split()

GOOD = ["--model", "m", "--data", "d"]


def written(tmp_path: Path, values: dict[str, Any] | str, name: str = "run.yaml") -> list[str]:
    """A configuration file and the flag that names it."""
    path = tmp_path / name
    text = (
        values if isinstance(values, str) else json.dumps(values) if name.endswith("json") else yaml.safe_dump(values)
    )
    path.write_text(text)
    return ["--config", str(path)]


# --- the flags


def test_flags__are_these_and_no_others() -> None:
    """Fails for a flag that comes or goes without a decision."""
    found = {action.dest for action in train.make_parser()._actions} - {"help"}
    assert sorted(found) == sorted(FLAGS)


def test_flags__cover_every_argument_that_is_not_of_python() -> None:
    fields = {item.name for kind in (TrainingArguments, TextPredictionConfig) for item in dataclasses.fields(kind)}
    of_python = {"evaluate_fn", "split_group_key", "split_ratios"}
    assert fields - set(FLAGS) == of_python


def test_help__says_every_flag_once_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        train.main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    said = re.findall(r"^  --(\w+)\b", text, flags=re.MULTILINE)
    assert sorted(said) == sorted(FLAGS)
    assert max(len(line) for line in text.splitlines()) <= 120


def test_help__is_given_whatever_else_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        train.main(["--config", "no such file", "--nonsense", "-h"])
    assert end.value.code == 0 and "usage:" in capsys.readouterr().out


def test_flags__take_dashes_for_underscores() -> None:
    assert train.parse([*GOOD, "--max-seeds", "7", "--do-eval", "false"]).args.max_seeds == 7


# --- flags, files and Python are the same

SAME: dict[str, tuple[list[str], dict[str, Any]]] = {
    "nothing": ([], {}),
    "numbers": (
        ["--learning_rate", "1e-4", "--max_seeds", "2", "--weight_decay", "0"],
        {"learning_rate": 1e-4, "max_seeds": 2, "weight_decay": 0.0},
    ),
    "switches": (
        ["--do_eval", "false", "--bf16", "true", "--encoder_eval_balance", "no"],
        {"do_eval": False, "bf16": True, "encoder_eval_balance": False},
    ),
    "null": (
        [
            "--min_convergent_seeds",
            "null",
            "--convergent_mean_by_class_threshold",
            "none",
            "--seed_stability_topk=null",
        ],
        {"min_convergent_seeds": None, "convergent_mean_by_class_threshold": None, "seed_stability_topk": None},
    ),
    "lists": (["--params", "a.*", "b.*"], {"params": ["a.*", "b.*"]}),
    "mappings": (
        ["--class_merge_map", "{A: [x, y], B: [z]}", "--class_merge_transition_groups", "[[x, z], [y, z]]"],
        {"class_merge_map": {"A": ["x", "y"], "B": ["z"]}, "class_merge_transition_groups": [["x", "z"], ["y", "z"]]},
    ),
    "cache": (["--use_cache", "only_convergent"], {"use_cache": "only_convergent"}),
    "cache as a switch": (["--use_cache", "true"], {"use_cache": True}),
    "parallel": (["--seeds_in_parallel", "false"], {"seeds_in_parallel": False}),
    "metadata": (["--metadata", "{author: me, runs: [1, 2]}"], {"metadata": {"author": "me", "runs": [1, 2]}}),
}


@pytest.mark.parametrize(("flags", "values"), SAME.values(), ids=list(SAME))
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_same__arguments_from_flags_from_a_file_and_from_python(
    tmp_path: Path, flags: list[str], values: dict[str, Any], suffix: str
) -> None:
    """Fails if one of the three ways reads a value differently: a run would depend on how it was written down."""
    python = TrainingArguments(**values)
    assert train.parse([*GOOD, *flags]).args == python
    config = written(tmp_path, {"model": "m", "data": "d", **values}, f"run.{suffix}")
    assert train.parse(config).args == python
    assert {name: type(value) for name, value in vars(train.parse(config).args).items()} == {
        name: type(value) for name, value in vars(python).items()
    }


def test_same__configuration_of_the_data(tmp_path: Path) -> None:
    flags = ["--target_classes", "F", "M", "--split_col", "null", "--masked_col", "text", "--random_state", "3"]
    values = {"target_classes": ["F", "M"], "split_col": None, "masked_col": "text", "random_state": 3}
    python = TextPredictionConfig(data="d", **values)
    assert train.parse([*GOOD, *flags]).config == python
    assert train.parse(written(tmp_path, {"model": "m", "data": "d", **values})).config == python


@pytest.mark.parametrize(
    "text",
    [
        "pre_prune_config: {n_samples: 16, topk: 1e-3, source: diff}\npost_prune_config: {topk: 7, part: decoder-bias}",
        "pre_prune_config:\n  n_samples: 16\n  topk: 0.001\n  source: diff\n"
        "post_prune_config:\n  topk: 7\n  part: decoder-bias",
    ],
    ids=["flow", "block"],
)
def test_same__prune_configurations_nested_in_a_file_or_as_a_flag(tmp_path: Path, text: str) -> None:
    pre = PrePruneConfig(n_samples=16, topk=0.001, source="diff")
    post = PostPruneConfig(topk=7, part="decoder-bias")
    from_file = train.parse(written(tmp_path, f"model: m\ndata: d\n{text}\n")).args
    assert (from_file.pre_prune_config, from_file.post_prune_config) == (pre, post)
    flags = ["--pre_prune_config", "{n_samples: 16, topk: 1e-3, source: diff}"]
    from_flags = train.parse([*GOOD, *flags, "--post_prune_config", "{topk: 7, part: decoder-bias}"]).args
    assert (from_flags.pre_prune_config, from_flags.post_prune_config) == (pre, post)


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "0.00001", "1.0e-5", '"1e-5"'])
def test_file__an_exponent_without_a_point_is_a_number(tmp_path: Path, text: str) -> None:
    """YAML itself reads 1e-5 as a text, which many users have lost an hour to."""
    args = train.parse(written(tmp_path, f"model: m\ndata: d\nlearning_rate: {text}\n")).args
    assert args.learning_rate == 1e-5 and type(args.learning_rate) is float


def test_flags__win_over_the_file(tmp_path: Path) -> None:
    values = {
        "model": "m", "data": "d", "learning_rate": 0.5, "do_eval": False, "params": ["a"], "max_seeds": 5,
        "pre_prune_config": {"topk": 0.5}, "min_convergent_seeds": None,
    }  # fmt: skip
    config = written(tmp_path, values)
    flags = (
        "--learning_rate 0.25 --do_eval true --params b c --min_convergent_seeds 2 --pre_prune_config null --model n"
    )
    for argv in ([*config, *flags.split()], [*flags.split(), *config]):
        command = train.parse(argv)
        args = command.args
        assert (command.model, args.learning_rate, args.do_eval, args.params) == ("n", 0.25, True, ["b", "c"])
        assert (args.min_convergent_seeds, args.pre_prune_config, args.max_seeds) == (2, None, 5)


@pytest.mark.parametrize("name", [item.name for item in dataclasses.fields(TrainingArguments) if item.type == "bool"])
@pytest.mark.parametrize("value", [True, False])
def test_file__sets_every_switch_either_way(tmp_path: Path, name: str, value: bool) -> None:
    """Fails if a switch that is on by default cannot be turned off in a file."""
    needs: dict[str, dict[str, Any]] = {
        "analyze_seed_stability": {"min_convergent_seeds": 2},
        "select_only": {"experiment_dir": "e"},
        "wandb_log_model": {"report_to": ["wandb"]},
    }
    more = needs.get(name, {})
    command = train.parse(written(tmp_path, {"model": "m", "data": "d", **more, name: value}))
    assert getattr(command.args, name) is value
    flags = [f"--{k}={v[0] if isinstance(v, list) else v}" for k, v in more.items()]
    assert getattr(train.parse([*GOOD, *flags, f"--{name}={value}"]).args, name) is value


def test_file__word_that_yaml_takes_for_a_switch_must_be_quoted(tmp_path: Path) -> None:
    """The classes on and off would silently be named True and False."""
    with pytest.raises(UserError, match=r"target_classes=\[True, False\] .* quotes"):
        train.parse(written(tmp_path, "model: m\ndata: d\ntarget_classes: [on, off]\n"))
    config = written(tmp_path, "model: m\ndata: d\ntarget_classes: ['on', 'off']\n")
    assert train.parse(config).config.target_classes == ["on", "off"]


def test_file__dry_run_may_stand_there(tmp_path: Path) -> None:
    assert train.parse(written(tmp_path, {"model": "m", "data": "d", "dry_run": True})).dry_run
    assert not train.parse(written(tmp_path, {"model": "m", "data": "d", "dry_run": False})).dry_run


# --- runs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A small model, its data, and a configuration over them."""
    root = tmp_path_factory.mktemp("inputs")
    tokenizer = tiny.wordpiece_tokenizer()
    tiny.base_model("bert", len(tokenizer)).save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    splits = ["train"] * 5 + ["validation"] * 2 + ["test"] * 2
    texts = [f"the {'old ' * i}doctor said that [MASK] was tired ." for i in range(len(splits))]
    (root / "data").mkdir()
    for name, word in (("M", "he"), ("F", "she")):
        rows = pd.DataFrame({"masked": texts, "label": word, "split": splits})
        rows.to_csv(root / "data" / f"{name}.csv", index=False)
    return {
        "model": str(root / "model"), "data": str(root / "data"), "target_classes": ["M", "F"], "train_batch_size": 2,
        "max_steps": 7, "eval_steps": 3, "max_seeds": 2, "min_convergent_seeds": None, "learning_rate": 1e-3,
        "pre_prune_config": {"n_samples": 4, "topk": 0.25},
    }  # fmt: skip


def test_dry_run__prints_the_plan_loads_no_weight_and_writes_nothing(
    tmp_path: Path, inputs: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def from_pretrained(*_args: Any, **_options: Any) -> None:
        raise AssertionError("--dry_run loaded the base model")

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", from_pretrained)
    config = written(tmp_path, {**inputs, "experiment_dir": str(tmp_path / "runs")})
    before = sorted(tmp_path.rglob("*"))
    assert train.main([*config, "--dry_run"]) == 0
    plan = {
        name: value
        for name, _, value in (line.strip().partition("  ") for line in capsys.readouterr().out.splitlines()[1:])
    }
    plan = {name: value.strip() for name, value in plan.items()}
    assert sorted(tmp_path.rglob("*")) == before
    model = tiny.base_model("bert", len(tiny.wordpiece_tokenizer()))
    size = sum(parameter.numel() for parameter in model.bert.parameters())
    assert plan["target classes"] == "M (+1), F (-1)"
    assert plan["rows of train"] in ("M→F: 5, F→M: 5", "F→M: 5, M→F: 5")
    assert plan["rows of validation"] in ("M→F: 2, F→M: 2", "F→M: 2, M→F: 2")
    assert plan["gradient items per epoch"] == "6 of up to 2 rows"
    assert plan["optimizer steps per seed"] == "7 in 2 epochs"
    assert plan["seeds"] == "up to 2, from 0"
    assert plan["weights of the base model's backbone"] == f"{size:,}"
    assert plan["weights that are trained on"] == f"{-(-size // 4):,}"
    needs = "memory needed, with the longest rows / free"
    for name in ("memory: base model", "memory: encoder, decoder and moments", needs):
        assert re.search(r"\d+\.\d+ (MiB|GiB)", plan[name]), name
    assert "disk: one model / at most at once" in plan
    assert plan["results"] == str(tmp_path / "runs")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, inputs: dict[str, Any]) -> Path:
    """The experiment directory of a run by the command."""
    root = tmp_path_factory.mktemp("finished")
    assert train.main(written(root, {**inputs, "experiment_dir": str(root / "runs")})) == 0
    return root / "runs"


def test_run__its_configuration_can_be_run_again_as_it_is(
    tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if the written configuration lacks a value, or holds one that the parser does not take back."""
    moved = tmp_path / "again"
    assert train.main(["--config", str(finished / "run_config.yaml"), "--experiment_dir", str(moved)]) == 0
    first = (finished / "model" / "model.safetensors").read_bytes()
    assert (moved / "model" / "model.safetensors").read_bytes() == first
    assert "<- selected" in capsys.readouterr().out
    ours, theirs = (yaml.safe_load((path / "run_config.yaml").read_text()) for path in (finished, moved))
    assert {**ours, "experiment_dir": None} == {**theirs, "experiment_dir": None}


def test_run__its_configuration_is_complete_and_says_the_version(finished: Path) -> None:
    text = (finished / "run_config.yaml").read_text()
    assert text.startswith(f"# gradiend_dist {gradiend_dist.__version__}, git ")
    assert sorted(yaml.safe_load(text)) == sorted(set(FLAGS) - {"config", "dry_run"})


def test_run__without_a_step_leaves_its_configuration(tmp_path: Path, inputs: dict[str, Any]) -> None:
    """Fails if it is written by the first step alone: evaluate and rewrite read it."""
    values = {**inputs, "initialization": "spectral", "max_steps": 0, "experiment_dir": str(tmp_path / "start")}
    assert train.main(written(tmp_path, values)) == 0
    assert yaml.safe_load((tmp_path / "start" / "run_config.yaml").read_text())["max_steps"] == 0


def test_run__checks_once_and_builds_one_schedule(
    tmp_path: Path, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the command and `train()` both check, or if the order of the rows is built again for the steps."""
    calls = []
    for module, name in ((trainer_module, "check_before_training"), (inputs_module, "make_schedule")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, real=real, name=name, **k: (calls.append(name), real(*a, **k))[1])
    values = {**inputs, "do_eval": False, "max_seeds": 1, "max_steps": 1, "experiment_dir": str(tmp_path / "once")}
    assert train.main(written(tmp_path, values)) == 0
    assert calls.count("check_before_training") == 1 and calls.count("make_schedule") <= 2, "training and held-out rows"


def test_run__equals_the_same_run_in_python(tmp_path: Path, finished: Path, inputs: dict[str, Any]) -> None:
    values = {name: value for name, value in inputs.items() if name not in ("model", "data", "target_classes")}
    args = TrainingArguments(**values, experiment_dir=str(tmp_path / "runs"))
    trainer = TextPredictionTrainer(inputs["model"], data=inputs["data"], target_classes=["M", "F"], args=args).train()
    expected = (finished / "model" / "model.safetensors").read_bytes()
    assert (trainer.model_path / "model.safetensors").read_bytes() == expected


def test_run__with_a_cached_result_loads_no_model(
    tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run of a command with use_cache ends at once, and changes neither model nor configuration."""

    def from_pretrained(*_args: Any, **_options: Any) -> None:
        raise AssertionError("the base model was loaded for a run that is done")

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", from_pretrained)
    runs = tmp_path / "runs"
    shutil.copytree(finished, runs)
    kept = ("run_config.yaml", "model/model.safetensors", "model/training.json")
    before = [(runs / name).read_bytes() for name in kept]
    again = ["--config", str(finished / "run_config.yaml"), "--experiment_dir", str(runs), "--use_cache", "true"]
    assert train.main(again) == 0
    assert [(runs / name).read_bytes() for name in kept] == before
    assert "<- selected" in capsys.readouterr().out


def test_run__prints_the_table_of_seeds_and_where_things_are(
    tmp_path: Path, inputs: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(written(tmp_path, {**inputs, "experiment_dir": str(tmp_path / "runs"), "run_id": "a"})) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["seed", "converged"]
    assert [line.split()[0] for line in lines[2:4]] == ["0", "1"]
    assert sum("<- selected" in line for line in lines) == 1
    assert f"  model        {tmp_path / 'runs' / 'a' / 'model'}" in lines
    assert (tmp_path / "runs" / "a" / "run_config.yaml").is_file()


# --- the console command


def test_console__tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["--version"]) == 0
    assert capsys.readouterr().out == f"gradiend-dist {gradiend_dist.__version__}\n"


@pytest.mark.parametrize(("argv", "code"), [(["--help"], 0), (["-h"], 0), ([], 2)])
def test_console__shows_its_subcommands(capsys: pytest.CaptureFixture[str], argv: list[str], code: int) -> None:
    assert __main__.main(argv) == code
    text = capsys.readouterr().out
    for name in __main__.SUBCOMMANDS:
        assert re.search(rf"^  {name} ", text, flags=re.MULTILINE)


def test_console__refuses_an_unknown_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["trian"]) == 2
    written_lines = capsys.readouterr().err.splitlines()
    assert len(written_lines) == 1
    assert "gradiend-dist: error: 'trian'" in written_lines[0]
    assert "train, evaluate, rewrite, apply, demo" in written_lines[0]


def test_console__train_is_the_training_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["train", "--max_seeds", "0", *GOOD]) == 2
    assert capsys.readouterr().err.startswith("gradiend-dist train: error: max_seeds=0 ")
