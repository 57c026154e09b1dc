"""Run one prompt live: active memories, what they write, and the effect of edits.

    trace(model, "The capital of France is")            every layer at one position, with the most important memories
    intervene(model, prompt, "L3N51=0")                 traces before and after memories are set, scaled or silenced
    generate(model, prompt, 20, "L3N51=0")              a continuation with edited memories
    silence_each, integrate, in_common                  the memories that a prediction depends on
    ValueChange, trying, side_effects, save_changed     changes to the values themselves

`model` is a loaded model, anything that load() accepts, or an index. For an index, its model is loaded, and memories
are shown with their triggers and patterns.
"""
