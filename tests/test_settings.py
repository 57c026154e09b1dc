"""Settings: every field rejects invalid values by the name of its option, and every option is a field."""

from dataclasses import Field, fields
from typing import Any

import pytest
from click import Context

from memlens.cli.app import program
from memlens.errors import SettingError
from memlens.settings import (
    CorpusSettings,
    LiveSettings,
    PatternSettings,
    ProbeSettings,
    RoleSettings,
    RunSettings,
    SampleSettings,
    ScanRunSettings,
    ScanSettings,
    ValueSettings,
    option_name,
    split_options,
)

VERBS: dict[str, tuple[Any, ...]] = {
    "scan": (ScanSettings, CorpusSettings, ScanRunSettings),
    "analyze": (ScanSettings, CorpusSettings, SampleSettings),
    "values": (ValueSettings, RunSettings),
    "patterns": (PatternSettings,),
    "roles": (RoleSettings,),
    "experiment": (SampleSettings, CorpusSettings, RunSettings),
    "probe": (ProbeSettings,),
    "serve": (LiveSettings,),
}
SETTINGS = list(dict.fromkeys(kind for kinds in VERBS.values() for kind in kinds))
FIELDS = [(kind, field) for kind in SETTINGS for field in fields(kind) if field.metadata]
by_field = pytest.mark.parametrize(
    ("settings", "field"), FIELDS, ids=[f"{kind.__name__}.{field.name}" for kind, field in FIELDS]
)


def make(settings: Any, **options: Any) -> Any:
    return settings(**({"sources": ("bundled",)} if settings is CorpusSettings else {}), **options)


def error_of(settings: Any, field: Field, value: Any) -> str:
    """Return the message for an invalid value; it must name the option and the value."""
    with pytest.raises(SettingError) as error:
        make(settings, **{field.name: value})
    assert str(error.value).startswith(f"{option_name(field.name)} is ")
    return str(error.value)


@by_field
def test_a_field_rejects_numbers_outside_its_limits_and_unknown_choices(settings: Any, field: Field) -> None:
    limits = field.metadata
    if (least := limits["minimum"]) is not None:
        make(settings, **{field.name: least})
        assert f"must be {least:,} or more" in error_of(settings, field, least - 1)
        if field.type is float:
            assert f"must be {least:,} or more" in error_of(settings, field, float("nan"))
    if (most := limits["maximum"]) is not None:
        assert f"must be {most:,} or less" in error_of(settings, field, most + 1)
        assert f"must be {most:,} or less" in error_of(settings, field, 10**20)
    if limits["choices"]:
        assert f"choose one of: {', '.join(limits['choices'])}" in error_of(settings, field, "zebra")


@by_field
def test_a_field_rejects_values_of_another_type(settings: Any, field: Field) -> None:
    if field.name != "layers":  # parsed by ScanSettings.with_preset
        wrong = 7 if "str" in str(field.type) else "seven"
        assert "it must be a" in error_of(settings, field, wrong)
        if field.type is not bool:
            assert "it must be a" in error_of(settings, field, True)


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        (PatternSettings, {"top": 2}, "--top is 2; it must be between 3 and 64"),
        (PatternSettings, {"top": 65}, "--top is 65; it must be between 3 and 64"),
        (PatternSettings, {"background": 999}, "--background is 999; it must be 1,000 or more"),
        (PatternSettings, {"rate": 0.0}, "--rate is 0.0; it must be a false discovery rate between 0 and 1"),
        (RoleSettings, {"rate": float("nan")}, "--rate is nan; it must be a false discovery rate"),
        (ProbeSettings, {"test": 1.0}, "--test is 1.0; it must be a share between 0 and 1"),
        (ProbeSettings, {"k": "1,,2"}, "--k is '1,,2'; separate the numbers"),
        (ProbeSettings, {"k": "1,0"}, "--k is '1,0'; separate the numbers"),
        (ProbeSettings, {"k": "1000000000"}, "--k is '1000000000'; separate the numbers with commas"),
        (RunSettings, {"gpus_per_worker": 2.0}, "--gpus-per-worker has no effect without --executor ray"),
        (RunSettings, {"ray_address": " ", "executor": "ray"}, "--ray-address is empty"),
        (ScanSettings, {"layers": ()}, "--layers is empty"),
        (ScanSettings, {"bos_prefix": True}, "--dedup prefix cannot be combined with this preset"),
    ],
)
def test_limits_of_a_single_field(settings: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError) as error:
        settings(**options)
    assert str(error.value).startswith(message)


def test_options_are_split_by_class_and_unknown_ones_are_rejected() -> None:
    options = {"top": 5, "unit": "line", "threads": 2, "layers": None}
    scan, corpus, run = split_options("scan", options, ScanSettings, CorpusSettings, ScanRunSettings)
    assert (scan, corpus, run) == ({"top": 5, "threads": 2}, {"unit": "line"}, {"threads": 2})
    with pytest.raises(SettingError, match=r"unknown values option 'tops'; known: .*reading.*top"):
        split_options("values", {"tops": 5}, ValueSettings, RunSettings)
    with pytest.raises(SettingError, match="unknown scan option 'sources'"):
        split_options("scan", {"sources": ("a",)}, ScanSettings, CorpusSettings)


@pytest.mark.parametrize("verb", VERBS)
def test_every_field_with_a_help_text_is_an_option_of_its_verb(verb: str) -> None:
    command: Any = program.get_command(Context(program), verb)
    options = {name for parameter in command.params for name in parameter.opts}
    described = {field.name for kind in VERBS[verb] for field in fields(kind) if field.metadata.get("help")}
    assert described and set(map(option_name, described)) <= options


def test_the_documented_defaults() -> None:
    assert (ScanSettings().top, ScanSettings().per_sentence, ScanSettings().dedup) == (50, "best", "prefix")
    assert (ScanSettings().batch_tokens, ScanSettings().seed, ScanSettings().preset) == (4096, 0, None)
    assert (ValueSettings().top, PatternSettings().top, PatternSettings().rate) == (50, 25, 0.01)
    assert (CorpusSettings(("a",)).unit, CorpusSettings(("a",)).column) == ("sentence", "text")
    assert (LiveSettings().waiting, LiveSettings().seconds, LiveSettings().prompt_tokens) == (4, 60, 512)
