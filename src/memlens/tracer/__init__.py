"""One prompt, live: what fired, what it wrote, and what happens if it is changed. An index adds names; none is needed.

    trace(model, "The capital of France is")            what every layer did, and which memories mattered
    intervene(model, prompt, "L3N512=0")                before and after, with memories set, scaled or silenced
    generate(model, prompt, 20, "L3N512=0")             how the text goes on
    silence_each, integrate, in_common                  which memories an answer hangs on
    ValueChange, trying, side_effects, save_changed     values themselves changed

The model is a loaded one, whatever load() takes, or an index, whose own model is loaded. The functions, and what they
take, are names of `memlens` as well; what they give back is documented here only.

Importing this package is cheap: torch comes in with the first name that is used.
"""
