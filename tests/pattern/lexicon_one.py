"""Words of the first planted corpus: the one the method was made with."""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


TOPICS = {
    "cricket": """
    wicket innings batsman bowler umpire over crease stumps spinner fielder boundary century ashes pitch slip""",
    "cooking": """
    butter onion simmer oven flour garlic sauce roast whisk dough pepper saucepan recipe spoon boil""",
    "astronomy": """
    comet orbit telescope galaxy nebula planet eclipse meteor lunar stellar asteroid quasar cosmic crater pulsar""",
    "law": """
    judge verdict plaintiff appeal jury statute courtroom defendant lawsuit attorney testimony clause ruling
    bail oath""",
    "sailing": """
    mast rudder harbour anchor hull schooner keel rigging tide helm deck frigate starboard voyage sailor""",
    "medicine": """
    fever vaccine surgeon diagnosis tumour artery dose clinic symptom infection nurse kidney therapy virus ward""",
    "music": """
    violin sonata chord melody orchestra cello tempo choir flute symphony rhythm soprano quartet composer hymn""",
    "farming": """
    plough barley cattle harvest tractor pasture fodder orchard fertile sheep meadow seed dairy crop hay""",
    "railway": """
    locomotive carriage platform signal freight siding gauge station boiler track viaduct junction timetable
    conductor rail""",
    "chess": """
    bishop knight pawn gambit checkmate castling rook endgame grandmaster opening tournament queen stalemate
    rank sacrifice""",
}
ENDINGS = [
    "press",
    "free press",
    "according",
    "as well",
    "such as",
    "the winner",
    "bridge",
    "because of the",
]
NGRAMS = [
    "for the first time",
    "grey stone",
    "in spite of",
    "by no means",
    "old town",
    "at the end",
    "no longer",
    "side by side",
]
STEMS_ING = _words("""
walking singing building waiting turning calling holding reading sleeping falling meeting sending
""")
STEMS_TION = _words("""
station nation relation fraction election solution mention position caution portion motion ration
""")
CAPITALS = _words("""
NATO UNESCO BBC USA FIFA NASA IBM UEFA OPEC WHO
""")
FILLER = _words("""
table window morning evening letter garden paper number figure people village corner winter summer colour mirror story
answer question moment reason matter person friend mother father brother sister teacher student master captain market
street office church castle tower island valley mountain river forest desert lake coast border country region bread
water metal paint cloth leather silver golden yellow orange purple green black white small large heavy light quick
slow early late strong weak quiet loud simple plain clever famous ancient modern common single double several certain
follow carry bring leave reach touch watch listen speak write open close begin finish offer accept refuse remain
appear become believe remember forget decide explain describe suggest report announce describe gather travel arrive
return wander basket bottle candle hammer ladder needle pocket ribbon saddle shovel ticket wagon blanket button carpet
cushion curtain breeze cloud frost shadow sunrise thunder silence whisper journey rumour secret legend custom fashion
habit wisdom courage anger sorrow delight envy pride honour mercy fortune bargain quarrel promise errand chimney
cellar attic stairs balcony farmer baker tailor weaver potter miller hunter fisher peddler beggar stranger widow
orphan nephew cousin uncle neighbour
""")
FUNCTION = _words("""
the the the the of of of and and in in to to a a was is that with for on as by at from it his her their
""")
NAMES = _words("""
Alder Brenn Cormac Delia Edwin Freda Gorman Hilda Ivor Jonas Karla Linus Magda Nils Orla Petra
""")
