"""What each experiment asks and how its numbers come about, in words.

The texts of the report, and the order in which it tells the story. This module reads nothing and draws nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

KEYS, LAYERS = "What memories hold", "How memories add up"


@dataclass(frozen=True)
class Topic:
    """One experiment of the paper, for a reader."""

    name: str  # of the experiment and its table
    part: str
    title: str
    figure: str  # in the paper; empty where memlens adds the experiment
    lead: str  # what to look for
    how: str  # the definition
    command: str = ""  # what makes the table, if not `memlens experiment`
    by_people: bool = False  # empty until people have done something

    @property
    def made_by(self) -> str:
        return self.command or f"memlens experiment INDEX {self.name}"


TOPICS: tuple[Topic, ...] = (
    Topic(
        "patterns",
        KEYS,
        "What kind of pattern do triggers share?",
        "Figure 2",
        "In the paper, keys of lower layers pick out wordings and keys of upper layers pick out subjects.",
        "A pattern is something that at least three of a memory’s strongest trigger prefixes have in common: shallow "
        "if it is a recurring wording, semantic if it is a recurring subject. A prefix counts as shallow, semantic, "
        "both or not covered, by the patterns it contains. The paper’s people labelled ten memories a layer; memlens "
        "finds patterns by machine, for every memory, so the two are alike in kind but not in procedure. Intervals: "
        "bootstrap over memories, since the prefixes of one memory belong together. Which patterns are believed is "
        "decided once for the whole model (Benjamini and Hochberg).",
    ),
    Topic(
        "patterns-people",
        KEYS,
        "What kind of pattern do people see?",
        "Figure 2",
        "The same shares from the labels of people who have finished, each on their own.",
        "People describe patterns of sampled memories, each in at least three prefixes, shallow or semantic, and tick "
        "the prefixes; nobody sees another’s labels before finishing. Intervals: bootstrap over the person’s memories.",
        "memlens annotate INDEX sample",
        by_people=True,
    ),
    Topic(
        "local-edits",
        KEYS,
        "Which part of a trigger matters?",
        "Figure 3",
        "Each trigger prefix is run again without one token. The further below zero, the more that token mattered.",
        "For a random choice of memories in each layer, the first, the last or a random token of each top trigger "
        "prefix is removed and the model is run again. The change is (m′ − m) / m, with m′ the coefficient at the new "
        "last position; it is averaged over a memory’s prefixes, then over memories. BOS is never removed, and a "
        "prefix of one token is left out. Intervals: bootstrap over memories; beside_last is the change less that of "
        "the last token, of the same memories.",
    ),
    Topic(
        "agreement",
        KEYS,
        "Do values predict what follows their triggers?",
        "Figure 4",
        "A memory agrees when the token its value promotes most is the very token that follows its strongest trigger.",
        "For each memory, argmax p(v) is compared with the token that follows the prefix with the highest "
        "coefficient; the share of memories where both are equal is shown by layer. Memories that never fire, and "
        "those whose strongest trigger ends its sentence, take no part. Intervals: bootstrap over memories. By chance "
        "one in a vocabulary agrees.",
    ),
    Topic(
        "rank",
        KEYS,
        "How highly does the value rank what follows?",
        "Figure 5",
        "Lower is better. Line: the median memory of a layer; band: the middle half of its memories.",
        "The rank of the token after the strongest trigger in p(v): 1 + the number of tokens with a strictly higher "
        "score. The table has ranks; the chart divides them by the size of the vocabulary, on a logarithmic axis, so "
        "that models with different vocabularies can be compared (the paper’s has 267,744 words).",
    ),
    Topic(
        "predictive-values",
        KEYS,
        "Where are the most confident values?",
        "Table 2",
        "The hundred values with the highest max p, by layer. In the paper 97 of them lie in layers 10 to 15.",
        "Values are ordered by max p(v). Precision is the share of a memory’s top triggers whose next token is the "
        "token that its value promotes most; a value agrees if that is so for at least one. Chance is how likely it "
        "would agree if its triggers were followed by tokens drawn at random from those that follow all triggers of "
        "its layer, its own among them: 1 − (1 − f)ⁿ for n triggers and a share f of the value’s top token.",
    ),
    Topic(
        "predictive-values-bins",
        KEYS,
        "Are confident values right more often?",
        "Figure 6",
        "Agreement of all memories, by how confident their value is.",
        "All memories are put into bins by max p(v); the share of memories that agree (as above) is shown for each "
        "bin.",
        "memlens experiment INDEX predictive-values",
    ),
    Topic(
        "active",
        LAYERS,
        "How many memories take part?",
        "Figure 7",
        "Line: the median prefix; band: the middle half of the prefixes.",
        "For each sampled prefix, the share of a layer’s memories whose coefficient is greater than 0. That is sparse "
        "for ReLU; GELU, SiLU and gated blocks are rarely exactly zero, so the effective number of memories, the "
        "participation ratio of |m| times the value’s norm, stands beside it in the table.",
    ),
    Topic(
        "composition",
        LAYERS,
        "Is a layer’s output the word of any one memory?",
        "Figure 8",
        "The higher, the more often a layer’s prediction is a mixture that no single memory of it would make.",
        "The share of sampled prefixes for which the top token of the layer’s output y differs from the top token of "
        "the value of every memory in the layer. The table also counts against the active memories alone. The paper’s "
        "bars are whole numbers over 4,096 although its text says 4,000 prefixes. Intervals: bootstrap over "
        "prefixes, and Wilson’s where the share is 0 or 1.",
    ),
    Topic(
        "refinement",
        LAYERS,
        "When is the prediction made?",
        "Figure 9",
        "How many prefixes have their final token on top of the residual stream already, before each feed-forward "
        "layer.",
        "The share of sampled prefixes for which the top token of the residual r before a layer’s feed-forward block "
        "is the token that the model finally predicts. States are read through the final norm and the output "
        "embedding. Intervals: bootstrap over prefixes, and Wilson’s where the share is 0 or 1; gain is the share less "
        "that of the first layer, on the same prefixes.",
    ),
    Topic(
        "confidence",
        LAYERS,
        "How sure is the residual?",
        "Figure 10",
        "Line: the median prefix; band: the middle half of the prefixes. The axis is stretched near zero.",
        "The probability that the residual r, read as a prediction, gives to the token that the model finally "
        "predicts.",
    ),
    Topic(
        "cases",
        LAYERS,
        "Who decides, the residual or the layer?",
        "Figure 11",
        "Bars add up to all sampled prefixes of a layer.",
        "By top tokens of residual r, layer output y and their sum o. Residual: o is r’s, not y’s. Ffn: o is y’s, not "
        "r’s. Agreement: all three the same. Composition: o is neither’s. Reversal: r and y agree, and o is another; "
        "impossible for linear logits, possible with a final norm, so it is counted and not hidden.",
    ),
    Topic(
        "last-layer",
        LAYERS,
        "What does the last layer change?",
        "Section 5.2",
        "Random prefixes whose prediction the last layer turns into one that neither side had. People judged 66 of "
        "the paper’s 100 changes to lead to a distant word, 34 to a related one.",
        "A random sample of last-layer compositions: the token on top of the residual before the last feed-forward "
        "block, the token on top after it, the cosine of both in the output embedding as a hint, the memories that "
        "pushed the change, and how many people call the two words related or distant (memlens annotate INDEX "
        "verdicts).",
    ),
    Topic(
        "contributions",
        LAYERS,
        "Where does the final logit come from?",
        "",
        "How much of the predicted token’s logit each layer’s attention and memories add.",
        "The final norm is frozen at the scale it really had, so that the logit of the final token is an exact sum of "
        "parts: embedding, attention and feed-forward blocks of every layer, and within a block its memories. Parts "
        "are averaged over the sampled prefixes.",
    ),
    Topic(
        "vetoes",
        LAYERS,
        "Which memories veto?",
        "",
        "Memories that push the residual’s favourite down when a layer changes the prediction.",
        "Over all sampled compositions, the memories whose part in the logit of the residual’s top token is most "
        "negative: how often, how strongly, and against which token.",
    ),
)

BY_NAME = {topic.name: topic for topic in TOPICS}
