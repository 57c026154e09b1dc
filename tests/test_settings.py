"""Settings: limits and choices are refused by the option's name, and every option of the command line is a field."""

from dataclasses import fields

import pytest
from typer.main import get_command

from memlens.cli.app import make_app
from memlens.errors import SettingError
from memlens.settings import (
    CorpusSettings,
    PatternSettings,
    RunSettings,
    SampleSettings,
    ScanRunSettings,
    ScanSettings,
    ValueSettings,
    divide,
)

VERBS = {
    "scan": (ScanSettings, CorpusSettings, ScanRunSettings),
    "analyze": (ScanSettings, CorpusSettings, SampleSettings),
    "values": (ValueSettings, RunSettings),
    "patterns": (PatternSettings,),
    "experiment": (SampleSettings, CorpusSettings, RunSettings),
}


@pytest.mark.parametrize(
    ("settings", "given", "words"),
    [
        (ScanSettings, {"top": 0}, "--top is 0; it must be 1 or more"),
        (ScanSettings, {"batch_tokens": 2**25}, "--batch-tokens is 33554432; it must be 16,777,216 or less"),
        (ScanSettings, {"dedup": "some"}, "--dedup is 'some'; choose one of: prefix, sentence, none"),
        (RunSettings, {"gpus_per_worker": 2.0}, "--gpus-per-worker counts for --executor ray only"),
        (RunSettings, {"gpus_per_worker": float("nan"), "executor": "ray"}, "--gpus-per-worker is nan; it must be 0"),
        (RunSettings, {"threads": 10**20}, "--threads is 100000000000000000000; it must be 512 or less"),
        (SampleSettings, {"seed": 10**20}, "--seed is 100000000000000000000; it must be 2,147,483,647 or less"),
        (ScanRunSettings, {"workers": 2000}, "--workers is 2000; it must be 1,024 or less"),
        (PatternSettings, {"top": 2}, "--top is 2; a pattern needs 3 triggers"),
        (SampleSettings, {"seed": -1}, "--seed is -1; it must be 0 or more"),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_its_option(settings: type, given: dict, words: str) -> None:
    with pytest.raises(SettingError) as refused:
        settings(**given)
    assert words in str(refused.value)


def test_options_are_divided_by_the_settings_that_have_them() -> None:
    given = {"top": 5, "unit": "line", "threads": 2, "layers": None}
    scanning, cutting, running = divide("scan", given, ScanSettings, CorpusSettings, ScanRunSettings)
    assert (scanning, cutting, running) == ({"top": 5, "threads": 2}, {"unit": "line"}, {"threads": 2})
    with pytest.raises(SettingError, match=r"unknown values option 'tops'; known: .*reading.*top"):
        divide("values", {"tops": 5}, ValueSettings, RunSettings)
    with pytest.raises(SettingError, match="unknown scan option 'sources'"):
        divide("scan", {"sources": ("a",)}, ScanSettings, CorpusSettings)


@pytest.mark.parametrize("verb", VERBS)
def test_every_field_with_a_help_is_an_option_of_its_verb(verb: str) -> None:
    command = get_command(make_app()).commands[verb]  # type: ignore[attr-defined]
    known = {name for parameter in command.params for name in parameter.opts}
    described = {field.name for kind in VERBS[verb] for field in fields(kind) if field.metadata.get("help")}
    assert described and {"--" + name.replace("_", "-") for name in described} <= known
