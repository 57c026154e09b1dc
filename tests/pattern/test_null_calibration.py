"""Memories whose triggers have no subject of their own get no topic: the nulls of docs/decisions, on real sentences.

Beside 100 memories with triggers from one file of the bundled prose, so that the cut for topics is as loose as with
real memories, there are 250 of each kind of fake: random prefixes, prefixes with one last token, with three last
tokens, and the triggers of the first 100 swapped for prefixes of other paragraphs with the same last token. All of it
twice: with 25 triggers a memory, and with 25 more that are held out and have a part in the test of topics.
"""

import random
from collections import defaultdict

import numpy as np
import pytest

from index_by_hand import Place, pieces, write_index
from memlens.corpus.sentences import read_units
from memlens.index.reader import Index
from memlens.pattern.matched import _noise
from memlens.pattern.table import compute_patterns
from memlens.settings import MOST_SEED, CorpusSettings

KINDS = ("subject", "random", "one token", "three tokens", "swapped")
REAL, FAKE = 100, 250


@pytest.fixture(scope="module", params=[25, 50])
def index(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Index:
    triggers_each = request.param
    units = list(read_units(CorpusSettings(("bundled:prose",))))
    texts, sources = [unit.text for unit in units], [unit.source for unit in units]
    cut = [pieces(text) for text in texts]
    draw = random.Random(17)
    files, by_token = defaultdict(list), defaultdict(list)
    for sentence, own in enumerate(cut):
        for position in range(3, len(own)):
            files[sources[sentence].rpartition(":")[0]].append((sentence, position))
            by_token[own[position]].append((sentence, position))
    everywhere = [place for own in files.values() for place in own]
    frequent = [own for own in by_token.values() if len({s for s, _ in own}) >= 2 * triggers_each]

    def one_a_sentence(places: list[Place], count: int = triggers_each) -> list[Place]:
        drawn = list({sentence: (sentence, p) for sentence, p in draw.sample(places, len(places))}.values())
        return draw.sample(drawn, min(count, len(drawn)))

    def swapped(place: Place) -> Place:
        own = by_token[cut[place[0]][place[1]]]
        return draw.choice([other for other in own if sources[other[0]] != sources[place[0]]] or own)

    subjects = list(files)
    made = {
        "subject": [one_a_sentence(files[subjects[i % len(subjects)]]) for i in range(REAL)],
        "random": [one_a_sentence(draw.sample(everywhere, 200)) for _ in range(FAKE)],
        "one token": [one_a_sentence(draw.choice(frequent)) for _ in range(FAKE)],
    }
    of_three = (
        [place for own in draw.sample(frequent, 3) for place in one_a_sentence(own, triggers_each // 3)]
        for _ in range(FAKE)
    )
    made["three tokens"] = [draw.sample(own, len(own)) for own in of_three]
    made["swapped"] = [list({swapped(place): 0 for place in made["subject"][i % REAL]}) for i in range(FAKE)]
    triggers = {(layer, m): places for layer, kind in enumerate(KINDS) for m, places in enumerate(made[kind])}
    index = write_index(tmp_path_factory.mktemp("null") / "index", texts, triggers, sources)
    compute_patterns(index)
    return index


@pytest.mark.sweep
def test_at_most_one_fake_memory_in_fifty_gets_a_topic(index: Index) -> None:
    query = "SELECT count(DISTINCT memory) AS n FROM {patterns} WHERE kind = 'semantic' AND layer = $1"
    counts = {kind: index.sql(query, [layer]) for layer, kind in enumerate(KINDS)}
    shares = {kind: rows[0]["n"] / (REAL if kind == "subject" else FAKE) for kind, rows in counts.items()}
    assert shares.pop("subject") >= 0.25, shares
    assert max(shares.values()) <= 0.02, shares


@pytest.mark.sweep
def test_at_most_one_set_of_random_prefixes_in_fifty_gets_a_pattern_of_any_kind(index: Index) -> None:
    rows = index.sql("SELECT DISTINCT memory FROM {patterns} WHERE layer = $1", [KINDS.index("random")])
    assert len(rows) <= 0.02 * FAKE


def test_every_seed_that_is_allowed_gives_places_a_noise_of_their_own() -> None:
    places = np.arange(1000)
    made = [_noise(places, places % 7, seed) for seed in (0, 1, 1 << 23, MOST_SEED)]
    assert len(set(np.concatenate(made).tolist())) == 4000
