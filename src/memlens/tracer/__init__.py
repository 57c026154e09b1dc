"""One prompt, live: which memories fire, what they write, and what changes when they are edited.

    trace(model, "The capital of France is")            every layer at one position, and the memories that mattered
    intervene(model, prompt, "L3N51=0")                 before and after, with memories set, scaled or silenced
    generate(model, prompt, 20, "L3N51=0")              the text continued with edited memories
    silence_each, integrate, in_common                  the memories that an answer depends on
    ValueChange, trying, side_effects, save_changed     values themselves changed

The model is a loaded one, whatever load() takes, or an index, whose model is loaded; an index adds names of memories.
"""
