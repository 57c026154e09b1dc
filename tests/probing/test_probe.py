"""Probes equal scikit-learn's own pipeline, activations equal single passes, a saved probe says the same."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.feature_selection import SelectKBest
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

import memlens
from memlens.files import write_sealed
from memlens.index.reader import Index
from memlens.models.memory_model import MemoryModel
from memlens.probing.activations import encode_texts, read_activations
from memlens.probing.fit import STRENGTHS, Columns, Fit, Split, differences, fit_sparse
from memlens.probing.labels import LabeledTexts, read_labels
from memlens.probing.probe import ProbeScore, fitting, select_best, write_verdict
from memlens.settings import ProbeSettings
from memlens.stats import Estimate
from memlens.testing import tiny_model, tiny_tokenizer

KS = ProbeSettings().sizes
WORDS = "river sea press free city Paris people news café rain hills war spring papers day".split(" ")  # noqa: SIM905
TEXTS = [" ".join(WORDS[(i + (1 + i // 15) * j) % 15] for j in range(2 + i % 5)) for i in range(80)]
ABOUT = ["water" if set(text.split()) & {"river", "sea", "rain"} else "land" for text in TEXTS]
NUMBERS = [float(len(text)) for text in TEXTS]
FAMILIES = ("gpt2", "llama", "qwen2_moe")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> MemoryModel:
    return memlens.load(tiny_model(request.param), tokenizer=tiny_tokenizer(adds_bos=request.param == "llama"))


def layers_of(model: MemoryModel, at: str) -> dict[int, tuple[Any, Any]]:
    encoded, _ = encode_texts(model, TEXTS)
    return {layer: (m, o) for layer, m, o in read_activations(model, encoded, at, range(len(model.layers)))}


@pytest.mark.parametrize("at", ["last", "mean", "max"])
def test_activations_are_those_of_each_text_alone(model: MemoryModel, at: str) -> None:
    found = layers_of(model, at)
    pool = {"last": lambda rows: rows[-1], "mean": lambda rows: rows.mean(0), "max": lambda rows: rows.amax(0)}[at]
    bos = [model.tokenizer.bos] if model.tokenizer.adds_bos else []
    for place, text in list(enumerate(TEXTS))[::9]:
        ids = model.tokenizer.encode([text])[0].ids
        with model.record() as recording:
            model.run_body(torch.tensor([bos + ids]))
        for layer, (m, o) in found.items():
            own, state = recording.coefficients[layer][0, len(bos) :], recording.o[layer][0, len(bos) :]
            np.testing.assert_allclose(m[place], pool(own), atol=2e-5)
            np.testing.assert_allclose(o[place], pool(state), atol=2e-5)


def test_several_passes_give_the_same_as_one(model: MemoryModel, monkeypatch: pytest.MonkeyPatch) -> None:
    one = layers_of(model, "last")
    monkeypatch.setattr("memlens.probing.activations._BYTES_AT_ONCE", 1)
    for layer, (m, o) in layers_of(model, "last").items():
        assert np.array_equal(m, one[layer][0]) and np.array_equal(o, one[layer][1])


@pytest.mark.parametrize(
    "model", ["gpt2", *(pytest.param(one, marks=pytest.mark.sweep) for one in FAMILIES[1:])], indirect=True
)
def test_a_probe_equals_scikit_learns_own_pipeline(model: MemoryModel) -> None:
    """The same texts, divided the same way; everything else is written here once more with scikit-learn."""
    result = memlens.probe(model, (TEXTS, ABOUT), k="1,4,16", seed=3)
    labels = read_labels((TEXTS, ABOUT), "", "", "auto")
    train, test = labels.split(0.3, 3)
    y = np.array([about == "water" for about in ABOUT]).astype(int)
    fitted, held = train_test_split(train, test_size=round(0.2 * len(train)), stratify=y[train], random_state=3)

    def pipe(k: int | None, c: float) -> Pipeline:
        ranked = SelectKBest(lambda z, own: abs(z[own == 1].mean(0) - z[own == 0].mean(0)), k=k or "all")
        return make_pipeline(StandardScaler(), ranked, LogisticRegression(C=c, max_iter=1000))

    for layer, (m, o) in layers_of(model, "last").items():
        for columns, k in ((m.astype(float), 1), (m.astype(float), 4), (m.astype(float), 16), (o.astype(float), None)):
            losses = [
                log_loss(y[held], pipe(k, c).fit(columns[fitted], y[fitted]).predict_proba(columns[held]))
                for c in STRENGTHS
            ]
            best = pipe(k, STRENGTHS[int(np.argmin(losses))]).fit(columns[train], y[train])
            area = roc_auc_score(y[test], best.predict_proba(columns[test])[:, 1])
            (own,) = [one for one in result.scores if (one.layer, one.k) == (layer, k)]
            assert own.score == pytest.approx(area, abs=1e-6) and own.low <= area <= own.high
            assert own.held == pytest.approx(-min(losses), abs=1e-6)


def test_the_difference_of_two_classes_is_positive_if_the_second_is_larger() -> None:
    assert differences(np.array([[0.0], [1.0], [3.0], [4.0]]), np.array([0, 0, 1, 1]), 2).tolist() == [3.0]


def noise(classes: int, each: int, seed: int, columns: int = 3072) -> tuple[Columns, Split]:
    y = np.repeat(np.arange(classes), each)
    texts = LabeledTexts(tuple(f"text {row}" for row in range(len(y))), y, tuple(f"{c:02}" for c in range(classes)))
    division = Split(texts, *texts.split(0.3, seed), seed)
    x = np.random.default_rng(seed).normal(size=(len(y), columns)).astype(np.float32)
    return Columns.of(x, division.train), division


@pytest.mark.parametrize("seeds", [1, pytest.param(3, marks=pytest.mark.sweep)])
def test_more_memories_do_not_tell_the_held_out_part_better_where_none_knows_the_label(seeds: int) -> None:
    for seed in range(seeds):
        columns, division = noise(2, 100, seed)
        fits = fit_sparse(columns, division, KS)
        assert max(fit.held for fit in fits.values()) < np.log(0.5) + 0.06


@pytest.mark.parametrize("seeds", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_where_one_memory_knows_the_label_few_are_chosen_and_the_score_is_its_own(seeds: int) -> None:
    kept = []
    for seed in range(seeds):
        columns, division = noise(2, 100, seed)
        columns.x[:, 7] += 2 * division.labels.y
        columns = Columns.of(columns.x, division.train)
        fits = fit_sparse(columns, division, KS)
        k = max(fits, key=lambda k: fits[k].held)
        y, own = division.labels.y[division.test], columns.x[division.test, 7]
        kept.append((k, fits[k].score.value - roc_auc_score(y, own)))
    assert max(k for k, _ in kept) <= 16 and np.mean([less for _, less in kept]) > -0.08


@pytest.mark.parametrize("seeds", [4, pytest.param(8, marks=pytest.mark.sweep)])
def test_permuted_labels_are_held_out_class_by_class_too(seeds: int) -> None:
    """Stratified by the true labels, a permuted class was missing from the fitted texts in a third of seeds."""
    for seed in range(seeds):
        columns, division = noise(20, 5, seed, columns=9)
        permuted = division.permuted()
        fitted, _ = permuted.held_out()
        assert set(permuted.y[fitted]) == set(permuted.y)
        assert fit_sparse(columns, permuted, [4])[4].weights.shape == (20, 4)
    columns, division = noise(2, 10, 1, columns=9)
    for part in range(20):
        fit_sparse(columns, division.permuted(part), [1])


def test_training_and_test_labels_are_permuted_each_within_its_part() -> None:
    _, division = noise(3, 20, 1, columns=2)
    y = division.labels.y
    permuted = [division.permuted(part).labels.y for part in range(5)]
    assert len({tuple(one) for one in permuted}) == 5
    for one in permuted:
        for rows in (division.train, division.test):
            assert sorted(one[rows]) == sorted(y[rows]) and (one[rows] != y[rows]).any()


def test_chance_of_texts_that_one_direction_separates_stays_near_one_half() -> None:
    """With true test labels, a probe of permuted training labels scored 0 or 1: the direction decides, not chance."""
    random = np.random.default_rng(3)
    y = np.repeat([0, 1], 40)
    x = (8 * y[:, None] * random.normal(size=30) + random.normal(size=(80, 30))).astype(np.float32)
    labels = LabeledTexts(tuple(f"text {row}" for row in range(80)), y, ("a", "b"))
    division = Split(labels, *labels.split(0.3, 0), 0)
    columns = Columns.of(x, division.train)
    scores, mixed = [], []
    for part in range(16):
        permuted = division.permuted(part)
        half = permuted.labels.y.copy()
        half[division.test] = y[division.test]
        with fitting():
            scores.append(fit_sparse(columns, permuted, [8])[8].score.value)
            mixed.append(fit_sparse(columns, replace(division, labels=replace(labels, y=half)), [8])[8].score.value)
    assert np.ptp(np.quantile(mixed, [0.025, 0.975])) > 0.9
    low, high = np.quantile(scores, [0.025, 0.975])
    assert 0.15 < low < 0.5 < high < 0.85


def made_fit(k: int, held: float, error: float) -> Fit:
    return Fit(np.arange(k), np.zeros((1, k)), np.zeros(1), 1.0, held, error, Estimate(0.5, 0.4, 0.6))


def test_the_best_probe_has_the_fewest_memories_within_one_standard_error() -> None:
    fits = [
        (0, made_fit(1, -0.60, 0.9)), (0, made_fit(4, -0.34, 0.01)), (1, made_fit(4, -0.33, 0.01)),
        (2, made_fit(4, -0.33, 0.01)), (1, made_fit(16, -0.30, 0.05)), (1, made_fit(64, -0.31, 0.05)),
    ]  # fmt: skip
    for shuffled in (fits, fits[::-1]):
        assert select_best(shuffled) == fits[2]  # -0.30 - 0.05 <= -0.33; layer 1 before layer 2
    assert select_best(fits[:1]) == fits[0]
    assert select_best([fits[0], (1, made_fit(16, -0.30, 0.0))])[1].columns.size == 16


def test_the_standard_error_is_that_of_the_likelihoods_of_held_out_texts() -> None:
    columns, division = noise(2, 40, 5, columns=6)
    (fit,) = fit_sparse(columns, division, [6]).values()
    fitted, held = division.held_out()
    x = StandardScaler().fit(columns.x[division.train[fitted]]).transform(columns.x[division.train])
    model = LogisticRegression(C=fit.strength, max_iter=1000).fit(x[fitted], division.y[fitted])
    logs = np.log(model.predict_proba(x[held])[range(len(held)), division.y[held]])
    assert fit.held == pytest.approx(logs.mean(), abs=1e-5)
    assert fit.held_error == pytest.approx(logs.std(ddof=1) / len(held) ** 0.5, rel=1e-3)


@pytest.mark.parametrize(
    ("score", "words", "chance", "verdict"),
    [
        (
            (0.9, 0.8, 0.95),
            0.6,
            (0.5, 0.35, 0.61),
            ": above chance (0.35 to 0.61) and better than a bag of words (0.60).",
        ),
        ((0.9, 0.8, 0.95), 0.97, (0.5, 0.35, 0.61), "worse than a bag of words (0.97)."),
        ((0.9, 0.8, 0.95), 0.85, None, "above chance (0.5) and about as well as a bag of words (0.85)."),
        ((0.6, 0.5, 0.7), 0.85, (0.5, 0.35, 0.61), "reaches AUC 0.60, which is within chance (0.35 to 0.61)."),
    ],
)
def test_the_verdict_compares_with_chance_and_with_words(score: Any, words: float, chance: Any, verdict: str) -> None:
    model = memlens.load(tiny_model("gpt2"), tokenizer=tiny_tokenizer())
    probe = replace(memlens.probe(model, (TEXTS, ABOUT), k="2", layers="1", shuffles=0).best, score=Estimate(*score))
    rows = [ProbeScore("words", None, None, words, words, words, 0.0, 0.0, 1.0)]
    sentence = write_verdict(probe, rows, None if chance is None else Estimate(*chance))
    assert sentence.endswith(verdict)
    assert sentence.startswith("2 memories of layer 1 predict the label with AUC 0.90") == (score[0] == 0.9)


def test_numbers_are_probed_by_ridge_regression(model: MemoryModel) -> None:
    result = memlens.probe(model, (TEXTS, NUMBERS), k="8", layers="1", kind="number")
    train, test = read_labels((TEXTS, NUMBERS), "", "", "number").split(0.3, 0)
    (own,) = [one for one in result.scores if one.input == "memories"]
    m, y = layers_of(model, "last")[1][0].astype(float), np.array(NUMBERS)
    z = StandardScaler().fit(m[train]).transform(m)
    related = np.array([np.corrcoef(column, y[train])[0, 1] if np.ptp(column) else 0 for column in z[train].T])
    z = z[:, np.argsort(-abs(related), kind="stable")[:8]]
    outputs = Ridge(alpha=1 / own.strength).fit(z[train], y[train]).predict(z[test])
    assert own.score == pytest.approx(np.corrcoef(outputs, y[test])[0, 1], abs=1e-6)
    assert result.measure == "correlation" and result.best.classes == ()


def test_several_classes_are_scored_by_the_share_that_is_right(model: MemoryModel) -> None:
    result = memlens.probe(model, (TEXTS, [str(len(text.split())) for text in TEXTS]), k="16", at="mean")
    assert result.measure == "accuracy" and len(result.best.weights) == len(result.classes) == 5
    assert result.best.score[0] in {one.score for one in result.scores}


@pytest.mark.parametrize("seeds", [2, pytest.param(3, marks=pytest.mark.sweep)])
def test_the_chance_range_is_that_of_the_best_probe_with_all_labels_permuted(seeds: int) -> None:
    model = memlens.load(tiny_model("gpt2"), tokenizer=tiny_tokenizer())
    means = []
    for seed in range(seeds):
        result = memlens.probe(model, (TEXTS, ABOUT), k="1,8", seed=seed, shuffles=12)
        labels = read_labels((TEXTS, ABOUT), "", "", "auto")
        division = Split(labels, *labels.split(0.3, seed), seed)
        columns = Columns.of(layers_of(model, "last")[result.best.layer][0], division.train)
        k = len(result.best.memories)
        naive = []
        for part in range(12):
            y = division.permuted(part).labels.y
            fits = fit_sparse(columns, replace(division, labels=replace(labels, y=y)), [k])
            naive.append(fits[k].score.value)
        assert result.chance == pytest.approx((np.mean(naive), *np.quantile(naive, [0.025, 0.975])))
        means.append(np.mean(naive))
    assert np.mean(means) == pytest.approx(0.5, abs=0.08)
    assert memlens.probe(model, (TEXTS, ABOUT), k="1", layers="0", shuffles=0).chance is None


def test_a_saved_probe_says_of_texts_what_it_said_when_it_was_fitted(model: MemoryModel, tmp_path: Path) -> None:
    result = memlens.probe(model, (TEXTS, ABOUT), k="16")
    result.best.save(tmp_path / "probe.json")
    probe = memlens.SparseProbe.load(tmp_path / "probe.json")
    assert probe == result.best
    _, test = read_labels((TEXTS, ABOUT), "", "", "auto").split(0.3, 0)
    predictions = probe.apply(model, [TEXTS[row] for row in test])
    y = np.array([ABOUT[row] == "water" for row in test])
    p = np.array([prediction.p["water"] for prediction in predictions])  # type: ignore[index]
    assert roc_auc_score(y, p) == pytest.approx(probe.score[0], abs=1e-9)
    assert all(prediction.label == ("water" if prediction.p["water"] > 0.5 else "land") for prediction in predictions)  # type: ignore[index]
    other = memlens.load(tiny_model("gpt2", seed=5), tokenizer=tiny_tokenizer())
    with pytest.raises(memlens.MemlensError, match="fingerprint differs"):
        probe.apply(other, TEXTS[:1])


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("layer", 7), ("layer", "1"), ("memories", ["L0N1"]), ("memories", [3] * 4), ("memories", "L1N1"),
        ("mean", [1.0]), ("mean", ["a"] * 4), ("mean", [float("inf")] * 4), ("scale", [0.0] * 4), ("at", "first"),
        ("weights", [[1.0] * 3]), ("weights", [[1.0], [2.0, 3.0]]),
        ("intercepts", None), ("typical", []), ("classes", [1, 2]), ("classes", 3),
        ("max_length", -1), ("score", [1.0]), ("score", 1), ("centre", {}),
    ],
)  # fmt: skip
def test_a_probe_that_was_made_up_is_refused(field: str, wrong: Any, tmp_path: Path) -> None:
    numbers = {"mean": [0.5] * 4, "scale": [1.0] * 4, "weights": [[1.0] * 4], "intercepts": [0.0], "centre": 0.0}
    texts = {"model": "m", "fingerprint": "f", "dtype": "float32", "at": "last", "max_length": None, "measure": "AUC"}
    names = {"layer": 1, "memories": [f"L1N{n}" for n in range(4)], "classes": ["a", "b"], "typical": [[0.0] * 4] * 2}
    whole = {"kind": "memlens probe", "schema": 1, "score": [0.5, 0.4, 0.6], **numbers, **texts, **names}
    write_sealed(tmp_path / "probe.json", whole)
    assert memlens.SparseProbe.load(tmp_path / "probe.json").layer == 1
    write_sealed(tmp_path / "probe.json", whole | {field: wrong})
    with pytest.raises(memlens.MemlensError, match=r"is not a valid probe|not a memory"):
        memlens.SparseProbe.load(tmp_path / "probe.json")


def test_steering_sets_memories_to_their_mean_among_texts_with_the_label(tmp_path: Path) -> None:
    model = memlens.load(tiny_model("gpt2"), tokenizer=tiny_tokenizer())
    probe = memlens.probe(model, (TEXTS, ABOUT), k="4").best
    train, _ = read_labels((TEXTS, ABOUT), "", "", "auto").split(0.3, 0)
    m = layers_of(model, "last")[probe.layer][0]
    number = model.names.number(memlens.MemoryId.parse(probe.memories[0]))
    with_label = [m[row, number] for row in train if ABOUT[row] == "water"]
    mean, own = np.mean([m[row, number] for row in train]), np.mean(with_label)
    once, twice = (probe.steer("water", strength).edits[0].coefficient for strength in (1, 2))
    assert once == pytest.approx(own, rel=1e-5) and twice == pytest.approx(mean + 2 * (own - mean), rel=1e-4)
    assert memlens.intervene(model, "The river", probe.steer("water")).kl > 0
    with pytest.raises(memlens.MemlensError, match="has no label 'fire'"):
        probe.steer("fire")


def test_memories_of_a_probe_link_to_their_triggers_and_values(
    tiny_gpt2_values: Index, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    file = tmp_path / "labels.jsonl"
    rows = [{"words": text, "topic": about} for text, about in zip(TEXTS, ABOUT, strict=True)]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    options = ("--column", "words", "--label", "topic", "--k", "1,4")
    saved, steer = tmp_path / "probe.json", tmp_path / "steer.json"
    more = ("--save", saved, "--steer", steer, "--towards", "water")
    code, out, _ = run("probe", tiny_gpt2_values.folder, file, *options, *more, "--json")
    content = json.loads(out)
    first = content["memories"][0]
    assert code == 0 and first["memory"] == content["best"]["memories"][0]
    trigger = tiny_gpt2_values.triggers(first["memory"])[0]
    assert first["trigger"]["before"] == trigger.before and first["summary"].startswith("promotes")
    value = tiny_gpt2_values.table("values").to_pylist()
    name = memlens.MemoryId.parse(first["memory"])
    (own,) = [row for row in value if (row["layer"], row["memory"]) == (name.layer, name.memory)]
    assert first["promotes"] == [tiny_gpt2_values.vocabulary[token] for token in own["tokens"][:5]]
    code, out, _ = run("probe", tiny_gpt2_values.folder, file, "--column", "words", "--apply", saved, "--json")
    assert code == 0 and {one["label"] for one in json.loads(out)} <= {"water", "land"}
    code, out, _ = run("trace", tiny_gpt2_values.folder, "The river", "--file", steer)
    assert code == 0
    code, out, _ = run("probe", tiny_gpt2_values.folder, file, *options)
    assert (
        code == 0
        and "best probe" in out
        and "permuted labels" in out
        and ("predict the label with AUC" in out or "do not show that memories predict" in out)
        and "bag of words" in out
        and "top trigger" in out
    )


def test_a_long_text_is_read_from_its_end() -> None:
    model = memlens.load(tiny_model("gpt2"), tokenizer=tiny_tokenizer())
    encoded, cut = encode_texts(model, [" ".join(WORDS * 4), "The river"], None)
    whole = model.tokenizer.encode([" ".join(WORDS * 4)])[0].ids
    assert cut == 1 and encoded[0] == whole[-32:] and len(encoded[1]) < 32


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            "text,label\n" + "".join(f"river {i},x\n" for i in range(30)),
            "every label is 'x'; a probe needs two classes or more",
        ),
        ("text,label\na,x\nb,y\nc,x\n", "3 distinct labeled texts are too few; a probe needs 20 or more"),
        ("text,label\na river,x\n ,y\n", "record 2: the text is empty"),
        ("text,topic\na river,x\n", "no column 'label'; choose one of these with --label: text, topic"),
        ("words,label\na river,x\n", "no column 'text'; choose one of these with --column: words, label"),
        ("text,label\na river\n", "record 1: the label is missing"),
        ("text,label\na, b,x\n", "record 1: the row has more fields than the header"),
        (
            "text,label\n" + "".join(f"river {i},x\n" for i in range(30)) + "b,y\n",
            "'y' has 1 texts; a class needs 5 or more",
        ),
        ("", "0 distinct labeled texts"),
        ("text,label\n" + "a river,x\n" * 30, "1 distinct labeled texts"),
        ("text,label\na river,x\na sea,y\n a river ,y\n", "the text 'a river' has two labels, 'x' and 'y'"),
        ("text,label,label\na river,x,y\n", "two columns have the same name"),
    ],
)
def test_labels_that_cannot_be_learnt_from_are_refused_in_one_line(
    content: str, reason: str, tmp_path: Path, tiny_gpt2: Path, refused: Callable[..., str]
) -> None:
    file = tmp_path / "labels.csv"
    file.write_text(content, encoding="utf-8")
    assert reason in refused("probe", tiny_gpt2, file)


def test_a_text_that_is_there_twice_is_read_once() -> None:
    """Else it would be learnt from and tested on: random labels were told with an AUC of 0.88."""
    found = read_labels((TEXTS * 3, ABOUT * 3), "", "", "auto")
    train, test = found.split(0.3, 0)
    assert found.texts == tuple(TEXTS) and found.repeats == 160
    assert not {found.texts[row] for row in train} & {found.texts[row] for row in test}
    numbers = [1 if about == "water" else 0.0 for about in ABOUT]
    assert read_labels((TEXTS, [*numbers[:-1], float(numbers[-1])]), "", "", "auto").classes == ("0", "1")


@pytest.mark.parametrize("missing", [None, float("nan"), " "])
def test_lists_without_a_label_are_refused(missing: Any) -> None:
    with pytest.raises(memlens.MemlensError, match="text 79: the label is missing"):
        read_labels((TEXTS, [*ABOUT[:-1], missing]), "", "", "auto")
    for wrong in ([TEXTS, ABOUT], (TEXTS, ABOUT, ABOUT)):
        with pytest.raises(memlens.MemlensError, match="neither a file nor a pair"):
            read_labels(wrong, "", "", "auto")  # type: ignore[arg-type]
    for test in (0.9, 0.95, 0.99):
        with pytest.raises(memlens.MemlensError, match="training texts are too few; lower --test"):
            read_labels((TEXTS, NUMBERS), "", "", "number").split(test, 0)
    with pytest.raises(memlens.MemlensError, match="too little to be squared"):
        read_labels((TEXTS, [number * 1e-200 for number in NUMBERS]), "", "", "number")
    with pytest.raises(memlens.MemlensError, match="2 test texts are too few"):
        read_labels((TEXTS, NUMBERS), "", "", "number").split(0.03, 0)


def test_what_else_is_refused(tmp_path: Path, tiny_gpt2: Path, refused: Callable[..., str]) -> None:
    file = tmp_path / "labels.csv"
    file.write_text("text,label\n" + "".join(f"{text},{about}\n" for text, about in zip(TEXTS, ABOUT, strict=True)))
    with pytest.raises(memlens.MemlensError, match="80 texts but 79 labels"):
        memlens.probe(tiny_gpt2, (TEXTS, ABOUT[:-1]))
    assert "unknown file type" in refused("probe", tiny_gpt2, tmp_path / "labels.xml")
    assert "cannot be read" in refused("probe", tiny_gpt2, tmp_path / "none.csv")
    assert "--k is '0'" in refused("probe", tiny_gpt2, file, "--k", "0")
    assert "--test is 1.5" in refused("probe", tiny_gpt2, file, "--test", "1.5")
    assert "layer 9 does not exist" in refused("probe", tiny_gpt2, file, "--layers", "9")
    assert "is not a number; use --kind classes" in refused("probe", tiny_gpt2, file, "--kind", "number")
    assert "must be given together" in refused("probe", tiny_gpt2, file, "--steer", tmp_path / "s.json")
    assert "is not a probe" in refused("probe", tiny_gpt2, file, "--apply", tiny_gpt2 / "config.json")
    assert "choose one of: auto, classes, number" in refused("probe", tiny_gpt2, file, "--kind", "words")
    memlens.probe(tiny_gpt2, file, k="1", layers="0", shuffles=0).best.save(tmp_path / "probe.json")
    steer = ("--steer", tmp_path / "s.json", "--towards", "sky")
    words = refused("probe", tiny_gpt2, file, "--apply", tmp_path / "probe.json", *steer)  # before it is applied
    assert "has no label 'sky'" in words
