"""gradiend-dist report: one page that opens from disk, says what the files say, and runs nothing that they hold."""

from __future__ import annotations

import base64
import copy
import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import browser
import pytest
import yaml

from gradiend_dist import __main__
from gradiend_dist.commands import report as report_command
from gradiend_dist.errors import UserError
from gradiend_dist.report import charts, sections
from gradiend_dist.report import html as page
from gradiend_dist.report import records as run_files

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;\ud800"
SECTIONS = ["convergence", "encodings", "seeds", "rewriting", "pruning", "speed", "health", "configuration"]


# --- runs made by hand


def record(seed: int = 0, *, correlation: float | None = 0.97, converged: bool = True, names: Any = ("M", "F")) -> dict:
    """What training.json holds of a run of 20 steps with evaluations at 0, 10 and 20; the best is 10."""
    score = 0.0 if correlation is None else correlation
    by_class = {
        what: {str(step): {"1.0": value * step / 20, "-1.0": -value * step / 20} for step in (0, 10, 20)}
        for what, value in {"min": 0.5, "q1": 0.7, "mean": 0.8, "q3": 0.9, "max": 1.0}.items()
    }
    by_class["n"] = {str(step): {"1.0": 40, "-1.0": 41} for step in (0, 10, 20)}
    return {
        "seed": seed,
        "losses": [0.5 / (step + 1) for step in range(20)],
        "best_score_checkpoint": {"correlation": correlation, "global_step": 10, "epoch": 0},
        "convergence_info": {
            "converged": converged,
            "convergence_metric": "correlation",
            "threshold": 0.5,
            "convergent_mean_by_class_threshold": 0.3,
            "convergent_min_target_class_abs_mean": 0.4,
        },
        "time": {"data_preparation": 3.0, "model_with_gradiend": 1.0, "eval": 4.0, "save": 1.5, "total": 10.0},
        "training_args": {"learning_rate": 0.125, "max_steps": 20},
        "training_stats": {
            "scores": {"0": 0.1, "10": score, "20": score - 0.05},
            "encoder_norms": {str(step): 0.5 + step for step in range(1, 21)},
            "label_value_to_class_name": {"1.0": names[0], "-1.0": names[1]},
            **{f"{what}_by_class": values for what, values in by_class.items()},
        },
    }


def measured(found: dict, share: float = 0.784, limit: float | None = 0.81) -> dict:
    """The same run, which has also measured what its decoder explains: this share at the best step."""
    found["training_stats"] |= {"explained": {"0": -400.0, "10": share, "20": 0.9}, "explained_limit": limit}
    return found


def closed_form(seed: int = 0) -> dict:
    """A record of max_steps=0: solved for, evaluated at step 0, nothing trained."""
    found = measured(record(seed, correlation=0.999))
    found["training_stats"] |= {"spectral": {"items": 16}, "scores": {"0": 0.999}, "explained": {"0": 0.8}}
    found["training_stats"] |= {"mean_by_class": {"0": {"1.0": 0.9, "-1.0": -0.9}}, "encoder_norms": {}}
    found["best_score_checkpoint"] = {"correlation": 0.999, "global_step": 0, "epoch": 0}
    return found | {"losses": [], "time": {"total": 1.5}}


def metrics(seed: int = 0, steps: int = 20, *, ended: bool = True, names: Any = ("M", "F")) -> list[dict]:
    rows: list[dict] = []
    for step in range(10, steps + 1, 10):
        split = {"seconds/data": 0.001, "seconds/base_gradient": 0.1 * step, "seconds/evaluation": 0.0}
        rates = {"gradients_per_second": 40.0 + step, "rows_per_second": 400.0, "memory_gib": 1.0 + step / 100}
        rows.append({"seed": seed, "step": step, "loss": 0.5 / step, "step_seconds": 0.2 * step, **split, **rates})
        means = {f"mean_encoding/{names[0]}": 0.4, f"mean_encoding/{names[1]}": -0.4}
        rows.append({"seed": seed, "step": step, "correlation": step / 25, **means})
    rows += [{"seed": seed, "converged": True, "best_step": 10, "best_correlation": 0.97}] if ended else []
    return [{"time": 1794966300.0 + i, **row} for i, row in enumerate(rows)]


RUN_ENDED = {"time": 1794966400.0, "best_seed": 0, "converged": True, "space_size": 1100, "pruned_size": 110}
CONFIG = {"model": "base", "target_classes": ["M", "F"], "learning_rate": 0.125, "weight_decay": 0.01, "max_seeds": 2}


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in value) if path.suffix == ".jsonl" else json.dumps(value))


def param_map(prefix: str = "bert.layer") -> dict:
    weights = [(f"{prefix}.{i}.dense.{part}", shape, kept) for i in (0, 1) for part, shape, kept in
               (("weight", [10, 50], 40 + i), ("bias", [50], 10 + i))]  # fmt: skip
    entries = [{"name": name, "shape": shape, "num_selected": kept} for name, shape, kept in weights]
    return {"mapping": {"param_map": entries}}


def grid() -> dict:
    def entry(id_: Any, p: float) -> dict:
        return {"id": id_, "probs_by_dataset": {"M": {"F": p}, "F": {"M": p / 2}}, "lms": {"lms": 0.5}}

    points = [entry({"feature_factor": f, "learning_rate": r}, 0.3) for f in (1.0, -1.0) for r in (0.1, 1, 0)]
    return {"results": [entry("base", 0.25), *points]}


def finished_run(directory: Path, *seeds: dict, rows: list[dict] | None = None, **config: Any) -> Path:
    """A finished run: the first seed was selected."""
    seeds = seeds or (record(0), record(1, correlation=0.3, converged=False))
    first = seeds[0]["seed"]
    write(directory / "training_stats.json", {"best_seed": first, "seeds": {str(r["seed"]): r for r in seeds}})
    write(directory / "model" / "training.json", seeds[0])
    write(directory / "model" / "config.json", param_map())
    reported = [
        {"seed": r["seed"], "output_dir": "/elsewhere", "converged": r["convergence_info"]["converged"],
         "convergence_reason": f"reason of {r['seed']}"} for r in seeds
    ]  # fmt: skip
    write(directory / "seeds" / "seed_report.json", {"best_seed": first, "runs": reported})
    (directory / "run_config.yaml").write_text("# gradiend_dist 9.9, git abc\n" + yaml.safe_dump({**CONFIG, **config}))
    if rows is not None:
        write(directory / "metrics.jsonl", rows)
    return directory


def running_run(directory: Path, names: Any = ("M", "F")) -> Path:
    """Seed 0 is done, seed 1 at step 10, and the process has just begun a line."""
    write(directory / "seeds" / "seed_0" / "training.json", record(0, names=names))
    (directory / "run_config.yaml").write_text(yaml.safe_dump({**CONFIG, "max_steps": 20, "target_classes": [*names]}))
    write(directory / "metrics.jsonl", [*metrics(0, names=names), *metrics(1, steps=10, ended=False, names=names)])
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"time": 1, "se')
    return directory


class Reader(HTMLParser):
    """Texts by section, and every tag with its attributes, as a browser's parser meets them."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"": []}
        self._section = ""
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.tags.append((tag, found))
        self._open.append(tag)
        self._section = found.get("id") or "" if tag == "section" else self._section

    def handle_endtag(self, tag: str) -> None:
        assert tag in self._open, f"</{tag}> without a beginning"
        while self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.texts.setdefault(self._section, []).append(data)

    def __getitem__(self, section: str) -> str:
        return " ".join(" ".join(self.texts[section]).split())


def read(directory: Path) -> Reader:
    assert report_command.main([str(directory)]) == 0
    return Reader((directory / "report.html").read_text())


# --- what the page says


def test_page__a_finished_run_with_all_sections(tmp_path, capsys):
    run = finished_run(tmp_path / "gender", rows=[*metrics(0), *metrics(1), RUN_ENDED])
    text = read(run)
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert [found["id"] for tag, found in text.tags if tag == "section"] == SECTIONS
    head = text[""]
    assert "gender converged Seed 0 of 2 was selected: correlation 0.9700 at step 10" in head
    assert "mean encoding M +0.400, F −0.400." in head
    assert "seeds converged 1 of 2" in head and "weights kept 102 9.27 % of 1,100" in head
    assert "alerts 0" in head and "✓" not in text["health"] and "No alert" in text["health"]
    assert "0 selected converged 10 0.9700 +0.400 −0.400" in text["seeds"]
    assert "1 not converged 10 0.3000" in text["seeds"] and "reason of 1" in text["seeds"]
    assert "reason of 0" not in text["seeds"], "a converged seed needs no reason"
    assert "gradiend_dist 9.9, git abc" in head + text["configuration"]


def test_explained__stands_beside_the_correlation_everywhere(tmp_path):
    text = read(finished_run(tmp_path, measured(record(0)), record(1, correlation=0.3, converged=False)))
    assert "correlation 0.9700 at step 10; the decoder explains 78 % of the target (class means: 81 %); " in text[""]
    assert "target explained 78 % class means: 81 %" in text[""]
    assert "correlation explains mean M" in text["seeds"]
    assert "0 selected converged 10 0.9700 78 % of 81 % +0.400 −0.400" in text["seeds"]
    assert "1 not converged 10 0.3000 – +0.400" in text["seeds"], "an old record among new ones"
    assert "Correlation threshold 0.5" in text["convergence"]
    assert "Target explained, % class means 81" in text["convergence"]
    assert "decoder −40k" in text["convergence"], "the tip of step 0, in per cent"
    assert "Target explained by all seeds, %" in text["convergence"]


def test_explained__far_below_zero_leaves_the_rest_in_view(tmp_path):
    text = read(finished_run(tmp_path, measured(record(0), share=-50.0, limit=None)))
    assert "the decoder explains < −999 % of the target (class means: –)" in text[""]
    assert "0.9700 < −999 % +0.400" in text["seeds"]
    drawn = charts.line_chart("t", [charts.Series("a", [(0, -40000.0), (1, 50.0)])], y_range=(0, 100), lowest=-100)
    assert "−100" in drawn and "−500" not in drawn
    top, bottom = charts.TOP, charts.HEIGHT - charts.BOTTOM
    y = [float(found) for found in re.findall(r"M[\d.]+ ([\d.]+)h0", drawn)]
    assert y == pytest.approx([bottom, top + (bottom - top) / 4], abs=0.1)


@pytest.mark.parametrize(
    ("share", "limit", "correlation", "spectral", "remedy"),
    [
        (0.012, 0.81, 0.97, False, "Use initialization=spectral , or learning_rate=auto ."),
        (-9.0, 0.81, -0.97, True, "Raise spectral_items , or"),
        (0.40, 0.81, 0.97, False, "Use"),
        (0.41, 0.81, 0.97, False, ""),
        (0.012, 0.81, 0.3, False, ""),  # the correlation says so already
        (0.012, None, 0.97, False, ""),
        (-0.2, -0.1, 0.97, False, ""),  # nobody could do better
    ],
)
def test_hint__an_untrained_decoder_under_a_high_correlation(tmp_path, share, limit, correlation, spectral, remedy):
    found = measured(record(correlation=correlation), share, limit)
    found["training_stats"] |= {"spectral": {}} if spectral else {}
    text = read(finished_run(tmp_path, found))[""]
    words = f"The decoder explains {max(round(100 * share), 0)} % of the target, class means would explain 81 %: "
    assert (words in text and remedy in text) if remedy else "would explain" not in text


def test_hint__waits_for_the_end(tmp_path):
    rows = [{**row, "explained": 0.01, "explained_limit": 0.81} if "correlation" in row else row for row in metrics(3)]
    write(tmp_path / "metrics.jsonl", rows[:-1])
    text = read(tmp_path)
    assert "the decoder explains 1 % of the target (class means: 81 %)" in text[""] and "would explain" not in text[""]
    assert "3 best so far in training 20 0.8000 1 % of 81 %" in text["seeds"]


def test_closed_form__has_no_losses_and_says_so(tmp_path):
    row = {"seed": 0, "step": 0, "correlation": 0.999, "explained": 0.8, "explained_limit": 0.81}
    ended = {"seed": 0, "converged": True, "best_step": 0, "best_correlation": 0.999}
    text = read(finished_run(tmp_path, closed_form(), rows=[row, ended, RUN_ENDED]))
    assert "Seed 0 was solved in closed form: correlation 0.9990 at step 0; the decoder explains 80 %" in text[""]
    assert "0 selected converged 0 0.9990 80 % of 81 % +0.900 −0.900 –" in text["seeds"]
    assert "In closed form: no step was trained." in text["convergence"]
    assert not [name for name in ("Loss", "Norms", "nothing recorded") if name in text["convergence"]]
    assert "No step was trained" in text["speed"] and "no metrics.jsonl" not in text["speed"]


def test_pruning__adds_up_by_layer_and_by_kind(tmp_path):
    text = read(finished_run(tmp_path))["pruning"]
    assert "102 of 1,100 weights (9.27 %)" in text
    assert "layer.0 50 9.09 % layer.1 52 9.45 %" in text
    assert "dense 102 9.27 %" in text
    assert "bert.layer.1.dense.bias 11 50 22 %" in text


@pytest.mark.parametrize(
    ("name", "layer", "kind"),
    [
        ("bert.encoder.layer.11.output.dense.weight", "encoder.layer.11", "output.dense"),
        ("model.layers.0.mlp.experts.3.w1.weight", "layers.0", "mlp.experts.3.w1"),
        ("h.2.attn.c_attn.bias", "2", "attn.c_attn"),
        ("bert.embeddings.LayerNorm.bias", "embeddings", "embeddings.LayerNorm"),
        ("lm_head.weight", "lm_head", "weight"),
        ("scale", "scale", "scale"),
    ],
)
def test_pruning__groups_of_a_name(name, layer, kind):
    assert (sections._layer(name), sections._kind(name)) == (layer, kind)


def test_pruning__nothing_pruned_and_no_model(tmp_path):
    run = finished_run(tmp_path)
    whole = {"mapping": {"param_map": [{"name": "a.weight", "shape": [30], "num_selected": 30}]}}
    write(run / "model" / "config.json", whole)
    assert "Nothing was pruned: all 30 weights are used. Prune with --pre_prune_config" in read(run)["pruning"]
    (run / "model" / "config.json").unlink()
    assert "not in RUN_DIR/model" in read(run)["pruning"]


def test_configuration__what_was_chosen_comes_first_and_the_rest_is_folded(tmp_path):
    text = read(finished_run(tmp_path, metadata={}, base_gradient_batch_size=8))["configuration"]
    chosen, _, rest = text.partition("arguments at their defaults")
    assert "learning_rate 0.125" in chosen and 'target_classes ["M", "F"]' in chosen and "max_seeds 2" in chosen
    assert "weight_decay 0.01" in rest and "metadata {}" in rest and "weight_decay" not in chosen
    assert "base_gradient_batch_size" in rest, "the second name of train_batch_size says nothing new"


def test_speed__weighs_rows_by_their_steps(tmp_path):
    rows = [
        {"seed": 0, "step": 10, "step_seconds": 4.0, "seconds/data": 1.0, "seconds/gradiend": 2.0, "memory_gib": 3.0},
        {"seed": 0, "step": 40, "step_seconds": 8.0, "seconds/data": 5.0, "seconds/gradiend": 2.0, "memory_gib": 2.0},
    ]
    text = read(finished_run(tmp_path, rows=[*rows, RUN_ENDED]))["speed"]
    assert "Time of a mean step, seed 0: 7 s." in text  # (10 * 4 + 30 * 8) / 40
    assert "data 4 s 57.1 % GRADIEND step 2 s 28.6 % everything else 1 s 14.3 %" in text
    assert "most memory 3 GiB" in text and "GPU busy" not in text


def test_without_metrics__says_what_is_missing_and_how_to_get_it(tmp_path):
    text = read(finished_run(tmp_path))
    assert "data and gradients of the base model 3 s 30 %" in text["speed"], "the record knows the whole seed"
    assert "everything else 500 ms 5 %" in text["speed"]
    for section in ("speed", "health"):
        assert "This run has no metrics.jsonl" in text[section] and "Train again" in text[section]
    assert "gradiend-dist evaluate RUN_DIR" in text["encodings"] and "gradiend-dist evaluate" in text["rewriting"]
    assert "alerts – not recorded" in text[""]


def test_alerts__are_listed_and_counted(tmp_path):
    alert = {"seed": 1, "step": 20, "alert": "loss_flat", "text": "the loss is flat: raise learning_rate"}
    text = read(finished_run(tmp_path, rows=[*metrics(0), alert, RUN_ENDED]))
    assert "loss flat seed 1, step 20 the loss is flat: raise learning_rate" in text["health"]
    assert "alerts 1 see Health" in text[""]


def test_one_seed__without_statistics_of_several(tmp_path):
    """A run that left its model alone: nothing else is needed, not even its configuration."""
    write(tmp_path / "model" / "training.json", record(7))
    text = read(tmp_path)
    assert "converged Seed 7 was trained: correlation 0.9700" in text[""]
    assert "learning_rate 0.125" in text["configuration"], "from the record"
    assert "Norms of the GRADIEND weights" in text["convergence"]
    assert "of all seeds" not in text["convergence"]


@pytest.mark.parametrize(
    ("correlation", "lowest", "words"),
    [(0.3, 0.4, "correlation 0.3000 is below 0.5"), (0.9, 0.1, "a target class has mean encoding 0.100, below 0.3")],
)
def test_not_converged__the_reason_stands_in_the_header(tmp_path, correlation, lowest, words):
    found = record(correlation=correlation, converged=False)
    found["convergence_info"]["convergent_min_target_class_abs_mean"] = lowest
    write(tmp_path / "model" / "training.json", found)
    text = read(tmp_path)
    assert f"not converged Seed 0 was trained, but {words}: correlation" in text[""]
    assert words in text["seeds"]


def test_loss_as_metric__has_no_correlation(tmp_path):
    found = record(correlation=None)
    found["best_score_checkpoint"] = {"correlation": None, "loss": 0.0123, "global_step": 10}
    found["convergence_info"] |= {"convergence_metric": "loss", "threshold": 0.02}
    found["training_stats"] = {}
    write(tmp_path / "model" / "training.json", found)
    text = read(tmp_path)
    assert "Seed 0 was trained: loss 0.0123 at step 10." in text[""] and "loss 0.0123 seed 0" in text[""]
    assert "Loss threshold 0.02" in text["convergence"] and "Correlation nothing recorded yet" in text["convergence"]


def test_running__shows_what_there_is_so_far(tmp_path):
    text = read(running_run(tmp_path))
    assert "not finished Seed 1 is at step 10 of 20 (last row 18 November 2026, 01:45 UTC)." in text[""]
    assert "Best so far is seed 0: correlation 0.9700 at step 10" in text[""]
    assert "seeds converged 1 of 1" in text[""]
    assert "0 best so far converged" in text["seeds"] and "1 in training 10 0.4000 +0.400 −0.400 0.05" in text["seeds"]
    assert "Time of a mean step, seed 1: 2 s." in text["speed"]
    assert "Known when a model is promoted" in text["pruning"]


def test_running__first_seed_has_only_rows(tmp_path):
    write(tmp_path / "metrics.jsonl", metrics(3, steps=20, ended=False))
    text = read(tmp_path)
    assert "Seed 3 is at step 20" in text[""] and "correlation 0.8000 at step 20" in text[""]
    assert "There is no run_config.yaml" in text["configuration"]


def test_running__ignores_what_an_earlier_run_left(tmp_path):
    """Fails if a directory that is trained in again shows its old model as the result."""
    run = finished_run(tmp_path, rows=metrics(0, steps=10, ended=False))
    text = read(run)
    assert "not finished Seed 0 is at step 10" in text[""] and "correlation 0.4000" in text[""]
    assert "0.9700" not in text[""] and "reason of" not in text["seeds"] and "in training" in text["seeds"]


def test_job_array__its_tasks_have_a_file_each_until_they_are_collected(tmp_path):
    run = running_run(tmp_path)
    rows = {seed: metrics(seed, steps=10 * seed, ended=False) for seed in (1, 2)}
    for seed, found in rows.items():
        write(run / f"metrics_seed_{seed}.jsonl", found)
        os.utime(run / f"metrics_seed_{seed}.jsonl", (2e9, 2e9))
    text = read(run)
    assert "Seed 2 is at step 20" in text[""] and "1 in training" in text["seeds"]
    os.utime(run / "metrics.jsonl", (2e9 + 1, 2e9 + 1))
    assert "Seed 1 is at step 10" in read(run)[""], "collected, or trained again, after the array"


def test_report_of_other_seeds__is_not_believed(tmp_path):
    """Trained again with one seed, after a run with two: the report beside it is the old one's."""
    run = finished_run(tmp_path)
    write(run / "training_stats.json", {"best_seed": 0, "seeds": {"0": record(0, correlation=0.2, converged=False)}})
    text = read(run)
    assert "correlation 0.2000 is below 0.5" in text[""] and "reason of" not in text["seeds"]


def test_moved_directory__nothing_outside_is_read(tmp_path):
    """Fails if the output_dir of the report, which holds another record now, is followed."""
    run = running_run(tmp_path / "run")
    elsewhere = tmp_path / "elsewhere"
    write(elsewhere / "training.json", record(0, correlation=0.1234))
    write(run / "seeds" / "seed_report.json", {"runs": [{"seed": 0, "output_dir": str(elsewhere), "converged": True}]})
    shutil.move(run, tmp_path / "moved")
    text = read(tmp_path / "moved")
    assert "0.9700" in text[""] and "0.1234" not in "".join(text[name] for name in ["", *SECTIONS])


def test_numbers_that_are_null__are_gaps(tmp_path):
    found = record()
    found["losses"][4] = None
    found["training_stats"]["scores"]["20"] = None
    found["training_stats"]["mean_by_class"]["10"]["1.0"] = None
    rows = metrics(0)
    rows[0]["step_seconds"] = rows[0]["gradients_per_second"] = None
    text = read(finished_run(tmp_path, found, rows=[*rows, RUN_ENDED]))
    assert "mean encoding F −0.400." in text[""]
    assert "0 selected converged 10 0.9700 – −0.400" in text["seeds"]


def test_encodings__rows_of_the_evaluation_come_before_those_of_the_record(tmp_path):
    run = finished_run(tmp_path)
    assert "M 40 +0.400 +0.250 +0.500" in read(run)["encodings"], "at the best step"
    with (run / "encoded_values_split_test.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "encoded", "label", "type"])
        rows.writerows([["a,\nb", 0.5, 1.0, "training"], ["c", 0.75, 1.0, "training"], ["d", "", 1.0, "training"]])
        rows.writerows([["e", -1, -1.0, "training"], ["f", 0.1, 0.0, "neutral_dataset"]])
    text = read(run)["encodings"]
    assert "encoded_values_split_test.csv" in text and "M 2 +0.625 +0.500 +0.750" in text
    assert "F 1 −1.000" in text and "neutral dataset 1 +0.100" in text and "gradiend-dist evaluate" not in text


def test_rewriting__one_panel_for_each_factor(tmp_path):
    run = finished_run(tmp_path)
    write(run / "decoder_grid_cache.json", grid())
    text = read(run)["rewriting"]
    assert "Feature factor +1" in text and "Feature factor −1" in text
    assert "Base model: P(M) at F 0.1250, P(F) at M 0.2500, language-model score 0.5000." in text


def test_rewriting__of_a_search_is_drawn_over_harm_with_its_choice_and_what_other_harms_reach(tmp_path):
    run = finished_run(tmp_path)
    stars = [tag for tag, _ in read(run).tags].count("polygon")
    trials = [{"harm": harm, "value": value} for harm, value in ((0.001, 0.3), (0.008, 0.9), (0.06, None))]
    chosen = {"base_value": 0.125, "value": 0.9, "harm": 0.008, "harm_error": 0.001, "relative_change": 4.1e-4}
    curve = [{"harm": 0.001, "value": 0.3}, {"harm": 0.005, "value": 0.75}]
    entry = {**chosen, "learning_rate": 0.02, "trials": trials, "curve": curve}
    write(run / "decoder_grid_cache.json", {"results": [], "selected": {"M": entry}})
    found = read(run)
    text = found["rewriting"]
    assert "reached within 0.1 % 0.5 %" in text and "M 0.3000 0.7500" in text
    assert "+0.80 ± 0.10 %" in text and "0.041 % 0.02" in text
    assert [tag for tag, _ in found.tags].count("polygon") == stars + 1


# --- what the page is made of


def hostile_run(directory: Path) -> Path:
    """HOSTILE wherever a file may hold a text."""
    names = (HOSTILE, HOSTILE + "2")
    alert = {"seed": 0, "step": 10, "alert": HOSTILE, "text": HOSTILE}
    rows = [*metrics(0, names=names), {**alert, f"seconds/{HOSTILE}": 1.0, "step_seconds": 2.0}, RUN_ENDED]
    run = finished_run(directory, record(names=names), rows=rows)
    said = HOSTILE[:-1]  # half of a surrogate pair is in no configuration that is read
    config = {**CONFIG, "target_classes": list(names), said: said, "pre_prune_config": {said: said}}
    (run / "run_config.yaml").write_text(f"# {said}\n" + json.dumps(config).replace("\\ud800", ""))
    write(run / "model" / "config.json", param_map(prefix=f"a.{HOSTILE}"))
    with (run / "encoded_values.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["encoded", "label", "type"], [0.5, 1.0, "training"], [0.2, 0, HOSTILE[:-1]]])
    write(
        run / "seeds" / "seed_report.json", {"runs": [{"seed": 0, "converged": False, "convergence_reason": HOSTILE}]}
    )
    points = [
        {"id": {"feature_factor": 1, "learning_rate": 0.1}, "lms": {"lms": 0.5}, "probs_by_dataset": {names[0]: {}}}
    ]
    write(run / "decoder_grid_cache.json", {"results": points})
    return run


KNOWN_TAGS = set(
    "html head meta title style body main header p h1 h2 span div b i nav a section figure figcaption svg g path line "
    "rect text polygon table thead tbody tr th td ul li br code details summary footer".split()
)


def test_hostile_texts__are_texts(tmp_path):
    run = hostile_run(tmp_path / "<img src=x onerror=alert(3)>")
    text = read(run)
    assert {tag for tag, _ in text.tags} <= KNOWN_TAGS
    attributes = {name for _, found in text.tags for name in found}
    assert not [
        name for name in attributes if name.startswith("on") or name in ("style", "src", "srcdoc", "xlink:href")
    ]
    assert {found["href"] for tag, found in text.tags if tag == "a"} == {f"#{name}" for name in SECTIONS}
    visible = HOSTILE.replace("\ud800", "?")
    for section in ("encodings", "seeds", "pruning", "speed", "health", "configuration"):
        assert visible[:-1] in text[section], section
    assert visible in text[""], "the classes in the header"


def test_page__asks_for_nothing_and_allows_only_its_own_style(tmp_path):
    html = read(finished_run(tmp_path, rows=[*metrics(0), RUN_ENDED])) and (tmp_path / "report.html").read_text()
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="(.*?)"', html)
    assert style and policy
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert policy[1] == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert html.index("Content-Security-Policy") < html.index("<style>"), "a policy holds from where it stands"
    assert not re.search(r"https?:|//[a-z]|url\(|@import|<script|<link|<img|<iframe", html)


def test_page__is_the_same_every_time(tmp_path):
    run = finished_run(tmp_path, rows=[*metrics(0), RUN_ENDED])
    read(run)
    first = (run / "report.html").read_bytes()
    read(run)
    assert (run / "report.html").read_bytes() == first


def test_import__needs_no_torch():
    code = "import sys; import gradiend_dist.commands.report as p; p.defaults(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Every place inside a JSON value; of long lists and of the steps of a series the first two."""
    yield path
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items)[: 2 if isinstance(value, list) or "10" in value else None] if items else ():
        yield from places(item, (*path, key))


def replaced(value: Any, path: tuple, new: Any) -> Any:
    if not path:
        return new
    value = copy.copy(value)
    value[path[0]] = replaced(value[path[0]], path[1:], new)
    return value


FILES = ["training_stats.json", "seeds/seed_report.json", "model/config.json", "metrics.jsonl", "run_config.yaml"]


@pytest.mark.parametrize("file", [*FILES, "decoder_grid_cache.json"])
def test_damaged_values__never_end_in_a_traceback(tmp_path, file):
    """Whatever stands in the place of a value, there is a page or one sentence."""
    run = finished_run(tmp_path, measured(record()), rows=[*metrics(0, steps=10), RUN_ENDED])
    write(run / "decoder_grid_cache.json", grid())
    write(run / "run_config.yaml", {**CONFIG, "max_steps": 20, "pre_prune_config": {"topk": 0.1}})
    lines = (run / file).read_text().splitlines() if file.endswith("jsonl") else [(run / file).read_text()]
    value = [json.loads(line) for line in lines]
    pages = 0
    strange = (None, "x", [], {}, [None], -1, float("inf"), 10**400, True)
    for turn, path in enumerate(places(value)):
        for new in strange if len(path) < 4 else (strange * 2)[turn % 9 :][:3]:
            changed = replaced(value, path, new)
            rows = changed if isinstance(changed, list) else [changed]
            (run / file).write_text("\n".join(map(json.dumps, rows)))
            try:
                page.page(run_files.read_run(run), {})
                pages += 1
            except UserError as error:
                assert str(run) in str(error)
    assert pages > 30


# --- the command


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "RUN_DIR is missing: pass the experiment_dir"),
        (["{tmp}/nowhere"], "nowhere is no directory"),
        (["{tmp}/empty"], "no record of a finished seed and no metrics.jsonl: pass the experiment_dir of a run"),
        (["{tmp}"], "pass a run inside it (a, b)"),
        (["{tmp}/a", "--output", "{tmp}/empty"], "is no regular file: pass the name of one"),
        (["{tmp}/a", "{tmp}/b", "--output", "{tmp}/x.html"], "is one file for several runs"),
        (["{tmp}/a", "--outptu", "x"], "unrecognized arguments"),
        (["{tmp}/damaged"], "training_stats.json is no valid JSON"),
        (["{tmp}/no_object"], "training.json holds no JSON object"),
        (["{tmp}/yaml"], "run_config.yaml is no valid YAML"),
        (["{tmp}/csv"], "encoded_values.csv is no valid CSV"),
    ],
)
def test_wrong_input__is_one_sentence(tmp_path, capsys, flags, words):
    for name in ("a", "b", "damaged", "yaml", "csv"):
        finished_run(tmp_path / "runs" / name if name not in ("a", "b") else tmp_path / name)
    for name in ("damaged", "yaml", "csv"):
        shutil.move(tmp_path / "runs" / name, tmp_path / name)
    for name in ("damaged", "yaml", "csv"):
        (tmp_path / name / "run_config.yaml").unlink()
    (tmp_path / "damaged" / "training_stats.json").write_text('{"seeds": {"0"')
    (tmp_path / "yaml" / "run_config.yaml").write_text("a: [1") if "{tmp}/yaml" in flags else None
    (tmp_path / "csv" / "encoded_values.csv").write_bytes(b"encoded,label,type\n\xff\xfe,1,training\n")
    write(tmp_path / "no_object" / "model" / "training.json", [1])
    (tmp_path / "empty").mkdir()
    assert report_command.main([flag.format(tmp=tmp_path) for flag in flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gradiend-dist report: error: ") and err.count("\n") == 1 and words in err
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".html" or "partial" in path.name]


def test_several_runs__one_table_and_a_failed_one_hides_no_other(tmp_path, capsys):
    good, weak = finished_run(tmp_path / "good", measured(record())), tmp_path / "weak"
    finished_run(weak, record(5, correlation=0.25, converged=False))
    going = running_run(tmp_path / "going")
    assert report_command.main([str(good), str(tmp_path / "none"), str(weak), str(going)]) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and "none is no directory" in err
    written, _, table = out.partition("\n\n")
    assert written.splitlines() == [str(run / "report.html") for run in (good, weak, going)]
    cells = [re.split(r"  +", line) for line in table.splitlines()]
    assert cells[0] == ["run", "best seed", "converged", "correlation", "explains", "pruned size"]
    assert cells[2:] == [
        [str(good), "0", "yes", "0.9700", "78 % of 81 %", "102"],
        [str(weak), "5", "no", "0.2500", "-", "102"],
        [str(going), "0", "not finished", "0.9700", "-", "-"],
    ]


def test_output__goes_where_it_is_told(tmp_path):
    run = finished_run(tmp_path / "run")
    assert __main__.main(["report", str(run), "--output", str(tmp_path / "deep" / "it.html")]) == 0
    assert (tmp_path / "deep" / "it.html").is_file() and not (run / "report.html").exists()


def test_help__ends_well(capsys):
    with pytest.raises(SystemExit) as end:
        report_command.main(["--help"])
    assert end.value.code == 0 and "gradiend-dist report" in capsys.readouterr().out


# --- charts


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (3, 147, [50, 100]),
        (1e-5, 4.2e-5, [1e-5, 2e-5, 3e-5, 4e-5]),
        (7, 7, [7]),
    ],
)
def test_round_numbers__few_and_round(low, high, ticks):
    assert charts.round_numbers(low, high) == ticks


def test_round_numbers__always_between_two_and_six():
    for low in (-3e7, -0.017, 0.0, 1e-9, 5.0):
        for width in (1e-7, 0.3, 7.0, 12345.0, 9.99e8):
            ticks = charts.round_numbers(low, low + width)
            assert 2 <= len(ticks) <= 6 or abs(low) / width > 1e8, (low, width, ticks)
            assert all(low - 1e-6 * width <= tick <= low + width * (1 + 1e-6) for tick in ticks)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (-0.5, "−0.5"), (1.24e-5, "1.2e−5"), (1e-4, "1e−4"), (12000, "12k"), (2.5e6, "2.5M"), (3e9, "3e9")],
)
def test_short__as_an_axis_shows_it(value, text):
    assert charts.short(value) == text


def test_line_chart__breaks_at_a_gap_and_marks_the_best():
    line = charts.Series("a", [(0, 0.0), (1, 1.0), (2, None), (3, 0.0), (4, 1.0)])
    drawn = charts.line_chart("t", [line], y_range=(0.0, 1.0), thresholds=[0.5, -0.5], best=4)
    path = re.search(r'class="c0 line" d="(.*?)"', drawn)
    assert path and re.sub(r"[\d. ]+", "", path[1]) == "MLML"
    assert 'class="star"' in drawn and "threshold ±0.5" in drawn
    assert drawn.count('class="mark"') == 2, "the one inside the range, and the legend"
    assert 'class="star"' not in charts.line_chart("t", [line], best=99), "not on the axis"


def test_smoothed__means_and_ranges_of_equal_parts():
    series = sections.smoothed([(step, None if step == 3 else float(step)) for step in range(1, 121)])
    assert series.points[:2] == [(5, 3.0), (10, 8.0)] and series.band[:2] == [(5, 1.0, 5.0), (10, 6.0, 10.0)]
    assert len(series.points) == 24
    assert sections.smoothed([(1, 2.0), (2, None)]).points == [(1, 2.0), (2, None)]


# --- in a browser


@pytest.fixture(scope="module")
def tab() -> Iterator[browser.Tab]:
    if browser.find_chromium() is None:
        pytest.skip("no Chromium here: apt install chromium, or name one by CHROMIUM=/path/to/it")
    with browser.chromium_tab() as found:
        yield found


def opened(tab: browser.Tab, path: Path, **how: Any) -> browser.Tab:
    tab.requests.clear()
    tab.complaints.clear()
    tab.open(path, **how)
    return tab


@pytest.mark.parametrize("make", [hostile_run, running_run])
def test_browser__shows_every_section_and_asks_for_nothing(tab, tmp_path, make):
    run = make(tmp_path / "run")
    read(run)
    opened(tab, run / "report.html")
    assert tab.requests == [(run / "report.html").as_uri()] and tab.complaints == []
    assert tab.ask("[...document.querySelectorAll('section')].map(s => s.id)") == SECTIONS
    assert tab.ask("[...document.querySelectorAll('section')].every(s => s.getBoundingClientRect().height > 50)")
    assert tab.ask("document.querySelectorAll('script, img, iframe, [onerror]').length") == 0
    drawn = "[...document.querySelectorAll('#convergence svg.chart .line')].map(p => p.getBBox().width)"
    assert sum(width > 100 for width in tab.ask(drawn)) >= 4
    assert tab.ask("getComputedStyle(document.querySelector('#verdict')).borderRadius") == "99px", "the style holds"


def test_browser__tip_shows_the_values_under_the_pointer(tab, tmp_path):
    read(finished_run(tmp_path))
    opened(tab, tmp_path / "report.html")
    shown = "[...document.querySelectorAll('.tip')].filter(t => getComputedStyle(t).visibility == 'visible')"
    assert tab.ask(f"{shown}.length") == 0
    tab.point_at("#convergence figure:nth-child(2) .at:nth-of-type(2)")
    assert tab.ask(f"{shown}.map(t => [...t.querySelectorAll('text')].map(x => x.textContent).join('|'))") == [
        "step 10|M  0.4000|F  −0.4000"
    ]


def test_browser__fits_a_phone_and_follows_the_theme(tab, tmp_path):
    run = hostile_run(tmp_path)
    read(run)
    colour = "getComputedStyle(document.body).backgroundColor"
    light = opened(tab, run / "report.html", width=360, height=780, touch=True).ask(colour)
    assert tab.ask("document.documentElement.scrollWidth") == 360, "nothing is wider than the phone"
    assert opened(tab, run / "report.html", dark=True).ask(colour) != light


def test_browser__would_see_a_request_and_a_dialog(tab, tmp_path):
    """The checks above are worth nothing if these go unnoticed."""
    bad = tmp_path / "bad.html"
    bad.write_text("<img src='http://127.0.0.1:9/x.png'><script>console.error('no'); alert(1)</script>")
    opened(tab, bad)
    assert "http://127.0.0.1:9/x.png" in tab.requests and {"['no']", "dialog: 1"} <= set(tab.complaints)
