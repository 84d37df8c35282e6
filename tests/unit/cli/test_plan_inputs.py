"""Profiles from files that hold anything at all: one clear error each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")

from penstock.cli.plan.inputs import read_given_profile
from penstock.errors import ConfigError

SOUND: dict[str, Any] = {"name": "frames", "length": 100, "sample_bytes": 1000, "wait_s": 0.1, "cpu_s": 0.1}
COST = {"worker_bytes": 1, "sample_s": 0, "batch_s": 0, "trainer_s": 0, "start_s": 0}


def test_a_sound_profile_is_read(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({**SOUND, "ours": COST, "step_s": 0.5}))
    found = read_given_profile(file)
    assert found.profile.length == 100 and found.profile.ours.worker_bytes == 1 and found.step_s == 0.5


@pytest.mark.parametrize(
    "text",
    [
        '{"sample_bytes": 1, "wait_s": ' + "9" * 5000 + "}",
        '{"sample_bytes": 1, "wait_s": ' + "9" * 400 + "}",
        '{"sample_bytes": 1, "cpu_s": ' + "9" * 400 + "}",
        '{"sample_bytes": 1, "step_s": ' + "9" * 400 + "}",
        json.dumps({"samples": [{"size_bytes": 10**400, "wait_s": 0, "cpu_s": 0}]}),
        json.dumps({"samples": [5]}),
        json.dumps({**SOUND, "length": "x"}),
        json.dumps({**SOUND, "length": -5}),
        json.dumps({**SOUND, "length": 10**400}),
        json.dumps({**SOUND, "name": 5}),
        json.dumps({**SOUND, "ours": None}),
        json.dumps({**SOUND, "ours": {**COST, "worker_bytes": None}}),
        json.dumps({**SOUND, "torchs": {**COST, "batch_s": "1"}}),
        json.dumps({**SOUND, "containers_bytes": None}),
    ],
    ids=range(14),
)
def test_a_profile_with_odd_figures_is_one_clear_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "profile.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_given_profile(file)
    assert str(file) in str(error.value) and len(str(error.value)) < 600
