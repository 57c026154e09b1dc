"""Each rule against planted weights and triggers, numbers against plain counting, roles where memories are shown."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import memlens
from memlens.index.reader import Index
from memlens.memory import ROLES
from memlens.models.memory_model import MemoryModel
from memlens.role.endings import CorpusEndings, count_endings, trigger_ends
from memlens.role.rules import assign, p_of_cosine, p_of_part, p_of_spread
from memlens.role.table import roles_by_layer
from memlens.role.weights import ValueReader, cosines_of
from memlens.stats import decoy_q_values
from memlens.testing import tiny_model, tiny_tokenizer

COUNTS = np.array([0 if token % 7 == 0 else 1 + token * token for token in range(97)])


@pytest.fixture(scope="module", params=["gpt2", "llama", "gemma2"])
def model(request: pytest.FixtureRequest) -> MemoryModel:
    return memlens.load(tiny_model(request.param), tokenizer=tiny_tokenizer())


def test_moments_are_those_of_every_value_over_tokens_of_the_corpus(model: MemoryModel) -> None:
    found = ValueReader(model, 1, "folded", COUNTS).moments(model.layers[1].values)
    scores = model.lens.value_scores(model.layers[1].values, 1, "folded").double().numpy()
    for row in range(0, 40, 7):
        own = np.array([scores[row, token] for token in range(97) if COUNTS[token]])
        centred = own - own.mean()
        assert found["kurtosis"][row] == pytest.approx((centred**4).mean() / (centred**2).mean() ** 2, rel=1e-5)
        assert found["skew"][row] == pytest.approx((centred**3).mean() / (centred**2).mean() ** 1.5, rel=1e-4)
        norm = float(model.layers[1].values[row].double().norm())
        assert found["variance"][row] == pytest.approx((centred**2).mean() / norm**2, rel=1e-5)
        logs = np.log([count for count in COUNTS if count])
        assert found["frequency"][row] == pytest.approx(np.corrcoef(own, logs)[0, 1], abs=1e-6)


@pytest.mark.filterwarnings("error")
def test_a_value_of_length_0_is_unusual_in_nothing(model: MemoryModel) -> None:
    lens, values = ValueReader(model, 1, "folded", COUNTS), model.layers[1].values.clone()
    whole = lens.moments(values)
    values[::3] = 0
    found = lens.moments(values)
    usual = {"variance": 0, "skew": 0, "kurtosis": 3, "frequency": 0, "norm": 0}
    for name, number in usual.items():
        assert (found[name][::3] == number).all()
        np.testing.assert_allclose(found[name][1::3], whole[name][1::3], rtol=1e-4, atol=1e-6)
    for p in (
        p_of_spread(found["variance"], lens.eigenvalues),
        p_of_part(lens.part_in_weak(values), lens.directions, lens.rank),
        p_of_cosine(lens.along_frequency(values), model.width),
    ):
        assert p[::3] == pytest.approx(1)
    with pytest.raises(ValueError, match="NaN"):
        decoy_q_values(np.array([1.0, np.nan]), np.zeros(2))


def test_random_directions_have_the_kurtosis_that_values_would_have(model: MemoryModel) -> None:
    lens, values = ValueReader(model, 1, "folded", COUNTS), model.layers[1].values
    np.testing.assert_allclose(lens.kurtosis(values).numpy(), lens.moments(values)["kurtosis"], rtol=1e-4)
    assert len(lens.random_kurtosis(5000, 0)) == 5000


def test_a_value_in_the_weak_directions_is_told_and_moves_no_logit(model: MemoryModel) -> None:
    lens = ValueReader(model, 2, "folded", COUNTS)
    weak, strong = lens.weak[:, 0], lens.read[:, -1]
    assert lens.part_in_weak(torch.stack([weak, strong])) == pytest.approx([1, 0], abs=1e-9)
    scores = model.lens.value_scores(torch.stack([weak, strong]).float(), 2, "folded")[:, COUNTS > 0].double()
    assert scores[0].var() < 0.05 * scores[1].var()
    values = model.layers[2].values
    whole = (values.double() @ lens.read).square().sum(1)
    naive = (values.double() @ lens.weak).square().sum(1) / whole
    np.testing.assert_allclose(lens.part_in_weak(values), naive, rtol=1e-9)


def test_a_value_along_the_frequency_of_tokens_is_told(model: MemoryModel) -> None:
    lens = ValueReader(model, 0, "folded", COUNTS)
    assert lens.along_frequency(lens.frequent[None]) == pytest.approx([1.0])
    scores = model.lens.value_scores(model.layers[0].values, 0, "folded")[:, COUNTS > 0].double().numpy()
    logs = np.log(COUNTS[COUNTS > 0])
    covariance = (scores - scores.mean(1, keepdims=True)) @ (logs - logs.mean())
    norms = model.layers[0].values.double().norm(dim=1).numpy() * float(lens.frequent.norm())
    np.testing.assert_allclose(lens.along_frequency(model.layers[0].values), covariance / norms, atol=1e-6)


def test_cosines_are_those_of_what_a_memory_reads_and_writes(model: MemoryModel) -> None:
    layer, found = model.layers[1], cosines_of(model.layers[1])
    group, norm = layer.groups[0], layer.input_norm
    assert norm is not None and norm.gain is not None
    for row in range(0, 40, 9):
        reads = ((group.keys if group.up is None else group.up)[row] * norm.gain).double()
        reads = reads - reads.mean() if norm.centers else reads
        value = group.values[row].double()
        naive = float(reads @ value / (reads.norm() * value.norm()))
        assert found["cos_in_out"][row] == pytest.approx(naive, abs=1e-6)
    assert found["gated"].all() == group.gated


def test_chances_of_random_directions_are_those_of_many_draws() -> None:
    drawn = np.random.default_rng(0).normal(size=(40_000, 12))
    parts = (drawn[:, :3] ** 2).sum(1) / (drawn**2).sum(1)
    cosines = drawn[:, 0] / np.linalg.norm(drawn, axis=1)
    for size in (0.2, 0.4, 0.6):
        assert p_of_part(np.array([size]), 3, 12)[0] == pytest.approx((parts >= size).mean(), abs=0.01)
        assert p_of_cosine(np.array([-size]), 12)[0] == pytest.approx((abs(cosines) >= size).mean(), abs=0.01)


def test_the_chance_of_a_spread_is_that_of_many_draws() -> None:
    random = np.random.default_rng(5)
    eigenvalues, drawn = np.array([9.0, 4, 1, 1, 0.5, 0.2, 0.1]), random.normal(size=(400_000, 7))
    spreads = (drawn**2 @ eigenvalues) / (drawn**2).sum(1)
    for quantile in (0.1, 0.5, 0.9, 0.99, 0.999):
        found = p_of_spread(np.quantile(spreads, [quantile]), eigenvalues)[0]
        assert found == pytest.approx(1 - quantile, rel=0.1)
    assert p_of_spread(np.array([10.0, 0.05]), eigenvalues).tolist() == [0, 1]


def test_decoys_bound_the_rate_of_false_discoveries() -> None:
    random = np.random.default_rng(3)
    numbers, decoys = random.normal(size=30).round(1), random.normal(size=40).round(1)
    numbers[:8] += 4
    rates = {t: (1 + (decoys >= t).sum()) * 30 / 40 / (numbers >= t).sum() for t in numbers}
    naive = [min(1.0, *(rate for t, rate in rates.items() if t <= one)) for one in numbers]
    np.testing.assert_allclose(decoy_q_values(numbers, decoys), naive)


def test_endings_are_counted_as_one_would_by_hand(tiny_gpt2_index: Index) -> None:
    sentences = {row["sentence"]: row["tokens"] for row in tiny_gpt2_index.table("corpus").to_pylist()}
    triggers = [
        row for row in tiny_gpt2_index.table("triggers").to_pylist() if row["layer"] == 1 and row["end"] == "top"
    ]
    found = count_endings(*trigger_ends(tiny_gpt2_index, 1), 40)
    corpus = CorpusEndings(tiny_gpt2_index, np.asarray(found["pair"], np.int64))
    met: set[tuple[int, ...]] = set()
    ends = []
    for _, tokens in sorted(sentences.items()):
        for at, token in enumerate(tokens):  # a prefix of an earlier sentence is never a trigger
            ends += [([-1, *tokens][at], token)] if tuple(tokens[: at + 1]) not in met else []
            met.add(tuple(tokens[: at + 1]))
    assert corpus.prefixes == len(ends) == tiny_gpt2_index.manifest.counts.prefixes
    assert corpus.frequency.sum() == tiny_gpt2_index.manifest.counts.tokens
    assert corpus.tokens.tolist() == np.bincount([last for _, last in ends], minlength=len(corpus.tokens)).tolist()
    for memory in range(40):
        own = [([-1, *sentences[row["sentence"]]], row["position"]) for row in triggers if row["memory"] == memory]
        pairs = Counter((tokens[at], tokens[at + 1]) for tokens, at in own)
        lasts = Counter(tokens[at + 1] for tokens, at in own)
        assert found["triggers"][memory] == len(own)
        if own:
            assert found["token_triggers"][memory] == max(lasts.values())
            assert found["token_cover"][memory] == sum(sorted(lasts.values())[-3:]) / len(own)
            assert found["pair_cover"][memory] == sum(sorted(pairs.values())[-3:]) / len(own)
            pair = (int(found["pair"][memory]) >> 32) - 1, int(found["pair"][memory]) & 0xFFFFFFFF
            assert pairs[pair] == found["pair_triggers"][memory] == max(pairs.values())
            assert corpus.pair_counts(np.array([found["pair"][memory]]))[0] == ends.count(pair)
            assert found["pair_token_triggers"][memory] == lasts[pair[1]] and found["last_tokens"][memory] == len(lasts)


def planted() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A thousand memories of no role, and at the front one for each role."""
    n, random = 1011, np.random.default_rng(1)
    names = ("token_cover", "pair_cover", "skew", "frequency", "cos_in_out", "kurtosis", "position")
    numbers: dict[str, Any] = {name: np.zeros(n) for name in names}
    numbers |= {"dead": np.zeros(n, bool), "is_long": np.zeros(n, bool), "gated": np.ones(n, bool)}
    numbers["triggers"] = np.full(n, 50)
    numbers["kurtosis"] = random.normal(3, 0.1, n)
    decoys = {name: numbers[name] + 1e-6 for name in ("kurtosis",)}  # above all that is not planted
    p = {
        name: random.uniform(size=n)
        for name in ("token", "n-gram", "weak", "frequency", "along", "variance", "position")
    }
    at = {role: place for place, role in enumerate(ROLES)}
    numbers["dead"][at["dead"]] = True
    numbers["token_cover"][[at["token"], at["n-gram"]]] = 0.95
    numbers["pair_cover"][at["n-gram"]] = 0.95
    numbers["position"][at["positional"]] = 0.3
    numbers["is_long"][at["entropy"]] = True
    numbers["frequency"][at["token-frequency"]] = -0.6
    numbers["cos_in_out"][[at["enrichment"], at["depletion"]]] = 0.8, -0.8
    numbers["kurtosis"][[at["prediction"], at["suppression"]]] = 20.0
    numbers["skew"][[at["prediction"], at["suppression"]]] = 1.0, -1.0
    tests = {"entropy": "weak", "token-frequency": "frequency", "enrichment": "along", "depletion": "along"}
    tests["partition"] = "variance"
    for role, name in ({"token": "token", "n-gram": "n-gram", "positional": "position"} | tests).items():
        p[name][at[role]] = 1e-12
    p["token"][at["n-gram"]] = 1e-12
    return numbers, p, decoys


def test_every_role_is_found_where_it_was_planted_and_nowhere_else() -> None:
    numbers, p, decoys = planted()
    exact = {role: np.flatnonzero(own).tolist() for role, own in assign(numbers, p, decoys, 0.01)[0].items()}
    for role in set(ROLES) - {"prediction", "suppression"}:  # heavy tails need a hundred memories
        assert exact[role] == [ROLES.index(role)], role


def test_a_hypothesis_is_asked_only_of_memories_that_may_have_the_role() -> None:
    """Else rejections among memories that cannot have a role make chance among those that can pass for one."""
    numbers, p, decoys = planted()
    p["weak"][100:600], p["along"][100:600] = 1e-12, 1e-12  # none of them is long, and none has a gate
    numbers["gated"][100:600], numbers["is_long"][600:900], numbers["cos_in_out"][600:900] = False, True, 0.8
    random = np.random.default_rng(2)
    p["weak"][600:900], p["along"][600:900] = random.uniform(size=(2, 300))
    roles, q = assign(numbers, p, decoys, 0.05)
    long = np.flatnonzero(numbers["is_long"])
    ordered = np.sort(p["weak"][long])
    passing = [rank for rank, one in enumerate(ordered, 1) if one <= 0.05 * rank / len(long)]
    assert roles["entropy"].sum() == max(passing) == 1 and roles["enrichment"].sum() == roles["depletion"].sum() == 1
    assert (q["weak"][100:600] == 1).all() and (q["along"][100:600] == 1).all()


def test_heavy_tails_are_found_against_decoys() -> None:
    numbers, p, decoys = planted()
    numbers["kurtosis"][100:300], numbers["skew"][100:200], numbers["skew"][200:300] = 20.0, 1.0, -1.0
    p["variance"][100:300] = 1e-12
    roles, q = assign(numbers, p, decoys, 0.01)
    assert (q["variance"][100:300] == 1).all(), "heavy tails are not asked for their spread as well"
    at = {role: set(np.flatnonzero(roles[role]).tolist()) for role in ("prediction", "suppression")}
    assert at["prediction"] == {*range(100, 200), ROLES.index("prediction")}
    assert at["suppression"] == {*range(200, 300), ROLES.index("suppression")}


def test_a_memory_that_fires_on_one_token_is_a_token_memory_and_random_ones_are_none() -> None:
    """Triggers drawn from a corpus of 50 equally frequent tokens; memory 0 fires on token 7 alone."""
    from memlens.role.rules import p_of_endings

    random = np.random.default_rng(2)
    memory = np.repeat(np.arange(200), 30)
    before, last = random.integers(0, 50, 6000), random.integers(0, 50, 6000)
    last[:30] = 7
    before[30:60], last[30:60] = 3, 9  # memory 1: the pair 3 9 only
    found: dict[str, Any] = dict(count_endings(memory, before, last, 200))
    found |= {"token_count": np.full(200, 2000), "pair_count": np.full(200, 40), "pair_token_count": np.full(200, 2000)}
    token, pair = p_of_endings(found, 50, 100_000)
    assert token[0] < 1e-20 and token[1] < 1e-20 and token[2:].min() > 0.01
    assert pair[1] < 1e-20 and pair[0] > 0.05 and np.quantile(pair[2:], 0.05) > 0.01
    assert found["token_cover"][0] == found["pair_cover"][1] == 1 and found["pair_cover"][0] < 0.9


def test_roles_are_in_show_and_search(
    tiny_gpt2_values: Index, copy_of: Callable[..., Index], run: Callable[..., Any], refused: Callable[..., str]
) -> None:
    index = memlens.roles(copy_of(tiny_gpt2_values), rate=0.99)
    rows = index.table("roles").to_pylist()
    assert len(rows) == 120 and [row["layer"] for row in rows[::40]] == [0, 1, 2]
    for own in roles_by_layer(index):
        mine = [row for row in rows if row["layer"] == own.layer]
        assert own.memories == 40 and own.none == sum(row["role"] is None for row in mine)
        assert all(own.roles[role] == sum(role in row["roles"] for row in mine) for role in ROLES)
    first = next(row for row in rows if row["roles"])
    name = f"L{first['layer']}N{first['memory']}"
    _, out, _ = run("show", index.folder, name, "--json")
    shown = json.loads(out)["roles"]
    assert shown["roles"] == first["roles"] and shown["numbers"]["kurtosis"] == pytest.approx(first["kurtosis"])
    _, out, _ = run("show", index.folder, name)
    assert f"role  {', '.join(first['roles'])}" in out
    _, out, _ = run("search", index.folder, "--role", first["roles"][0], "--limit", 200, "--json")
    found = {hit["name"] for hit in json.loads(out)["found"]}
    assert found == {f"L{row['layer']}N{row['memory']}" for row in rows if first["roles"][0] in row["roles"]}
    assert run("check", index.folder)[0] == 0
    code, out, _ = run("values", index.folder, "--reading", "raw")
    assert code == 0 and "earlier values" in str(run("check", index.folder)) and memlens.roles(index, rate=0.99)
    assert "earlier values" not in str(run("check", index.folder))
    assert "'--role': 'boss' is not one of 'dead'" in refused("search", index.folder, "--role", "boss")
    assert "run `memlens roles" in refused("search", tiny_gpt2_values.folder, "--role", "token")
    assert "--rate is 2" in refused("roles", index.folder, "--rate", "2")
    code, out, _ = run("roles", index.folder)
    assert code == 0 and out.startswith("layer ")
    again = index.folder.joinpath("roles.parquet").read_bytes()
    assert memlens.roles(index).folder.joinpath("roles.parquet").read_bytes() == again
