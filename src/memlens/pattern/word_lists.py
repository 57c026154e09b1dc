"""Names that a person would give to a class of last words: "a month" for May, June and July.

A class comes from the model's embeddings and has no name. Where three quarters of its words are in one of the lists
below, it is called that; else its most frequent words stand for it. A list is a class of its own as well: people say "a
preposition" of words that the model need not take for alike. The lists are of English.
"""

from collections.abc import Sequence

SHOWN = 3
_ENOUGH = 0.75

_LISTS = {
    "a month": "january february march april may june july august september october november december jan feb mar apr "
    "jun jul aug sept sep oct nov dec",
    "a day of the week": "monday tuesday wednesday thursday friday saturday sunday",
    "a number word": "one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty hundred "
    "thousand million billion dozen",
    "an ordinal word": "first second third fourth fifth sixth seventh eighth ninth tenth last next",
    "a personal pronoun": "i you he she it we they me him her us them himself herself itself themselves myself",
    "a possessive": "my your his her its our their whose",
    "a relative or question word": "who which that what where when why how whose whom whether",
    "a modal verb": "can could may might must shall should will would cannot",
    "a form of be": "be is are was were been being am",
    "a form of have": "have has had having",
    "an article": "the a an",
    "a demonstrative": "this that these those such",
    "a preposition": "of in on at by for with from to into through during under over between among against about near "
    "across after before within without upon toward towards along around behind beyond until since",
    "a conjunction": "and or but nor although though while whereas because since if unless however whilst",
    "a word of amount": "many much several few some most all both each every any more less various numerous other",
    "a word of frequency": "often usually sometimes always never rarely generally frequently commonly typically",
    "a word of degree": "very quite rather so too extremely fairly highly particularly especially more most less",
    "a word of approximation": "about around approximately roughly nearly almost over least estimated",
    "a word of time": "now then later soon today already still ago before after once again",
    "a word of size": "large small big tiny huge great little larger smaller largest smallest vast",
    "a word of kinship": "father mother son daughter brother sister wife husband uncle aunt cousin nephew niece "
    "grandson grandfather grandmother parents children child family sons daughters",
    "a direction": "north south east west northern southern eastern western northeast northwest southeast southwest",
    "a colour": "red blue green yellow black white brown grey gray orange purple pink",
    "a title": "mr mrs ms dr sir lord lady president king queen prince princess emperor pope general captain saint st",
    "a unit of time": "year years month months week weeks day days hour hours minute minutes second seconds decade "
    "decades century centuries",
    "a unit of measure": "km m cm mm kg g miles mile metres meters feet foot inches kilometers kilometres pounds tons "
    "acres",
    "a continent": "europe asia africa america australia antarctica",
    "a country": "england france germany spain italy russia china japan india canada australia britain scotland "
    "ireland wales mexico brazil poland greece egypt turkey iran iraq israel sweden norway denmark finland austria "
    "hungary switzerland belgium netherlands portugal argentina cuba vietnam korea pakistan afghanistan",
    "a nationality or language": "english french german spanish italian russian chinese japanese indian canadian "
    "australian british scottish irish welsh mexican polish greek egyptian turkish dutch swedish norwegian danish "
    "finnish american latin arabic hebrew hungarian portuguese roman european african asian jewish",
    "a first name": "john william james george charles thomas robert henry richard edward david michael peter paul "
    "joseph samuel daniel frank arthur walter mary elizabeth anne margaret alexander martin stephen philip louis",
    "a closing mark": ") ] } ” \" '",
    "a mark": ". , ; : ! ? - – — ( ) / & % $",
}
_WORDS = {name: frozenset(words.split()) for name, words in _LISTS.items()}


def lists_of(word: str) -> list[str]:
    """The lists that a word without capitals is in: "a month" and "a modal verb" for may."""
    return [name for name, words in _WORDS.items() if word in words]


def describe_class(examples: Sequence[str]) -> str:
    """`ends with a month: may, june, july`, or `ends with a word like barge, ferry, canoe`."""
    shown = ", ".join(examples[:SHOWN])
    if not examples:
        return "ends with words that the model takes for alike"
    shares = {name: sum(word in words for word in examples) / len(examples) for name, words in _WORDS.items()}
    best = max(shares, key=lambda name: shares[name])
    return f"ends with {best}: {shown}" if shares[best] >= _ENOUGH else f"ends with a word like {shown}"
