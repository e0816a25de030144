"""What is told of a run, and that no secret is among it."""

from __future__ import annotations

import pytest

from gradiend_dist.storage import provenance as facts

ENVIRONMENT = {
    "WANDB_API_KEY": "0123456789abcdef0123",
    "HOME": "/somewhere/quiet",
    "HF_TOKEN": "short",
    "A_KEY": "k" * 9,
}


NAMED = ("api_key", "hf_token", "password", "db_passwd")
PLAIN = {
    "decoder_eval_ignore_tokens": ["he", "she"],
    "max_tokens": 3,
    "data": "/somewhere/quiet/rows.csv",
    "x": "short",
}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (dict.fromkeys(NAMED, "x"), dict.fromkeys(NAMED, "***")),
        ({"notes": "key 0123456789abcdef0123 inside"}, {"notes": "key *** inside"}),
        ({"deep": [{"Secret": "s"}, "kkkkkkkkk"]}, {"deep": [{"Secret": "***"}, "***"]}),
        ("https://me:pass@example.org/x", "https://***@example.org/x"),
        ("hf_abcdefghijklmnopqrstuvwx", "***"),
        (PLAIN, PLAIN),
        (3.5, 3.5),
        (None, None),
    ],
)
def test_secrets__are_blotted_out_and_nothing_else(value: object, expected: object) -> None:
    assert facts.without_secrets(value, ENVIRONMENT) == expected


def test_versions_and_hardware__name_what_a_run_was_made_with() -> None:
    assert facts.versions()["torch"].startswith("2.")
    assert facts.hardware()["cpu_count"] >= 1
    assert len(facts.git_hash()) >= 7


def test_job__says_who_runs_it_and_nothing_else_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JWT", "secret")
    assert facts.job()["slurm_job_id"] == "17" and "secret" not in str(facts.job())
