"""What is written down of a program holds no secrets."""

from __future__ import annotations

import pytest

from penstock.monitor.runs.facts import run_facts, run_name, without_secrets


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["train.py", "--lr", "0.1"], ["train.py", "--lr", "0.1"]),
        (["--wandb-api-key", "abcdef", "--lr", "1"], ["--wandb-api-key", "***", "--lr", "1"]),
        (["--token=abcdef", "password=x"], ["--token=***", "password=***"]),
        (["--auth", "--lr", "1"], ["--auth", "--lr", "1"]),
        (["s3://user:pw@bucket/x"], ["s3://***@bucket/x"]),
        (["-c", "login('hf_abcdefghijklmnop')"], ["-c", "login('***')"]),
        (["--tokenizer", "t5-base", "--author", "me", "--keyframes", "3"],) * 2,
    ],
)
def test_what_looks_like_a_secret_is_hidden(words: list[str], shown: list[str]) -> None:
    assert without_secrets(words) == shown


def test_the_environment_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "very-secret-value")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    facts = run_facts("x", 1.0)
    assert "very-secret-value" not in repr(facts)
    assert facts["rank"] == {"rank": 3, "world_size": 8}


def test_a_name_that_is_not_text_becomes_text() -> None:
    assert run_name("a\ud800b") == "a?b" and len(run_name("x" * 10**6)) == 20_000 and run_name(5) == "5"  # type: ignore[arg-type]
