"""Run one prompt: the active memories, what they write to the stream, and the effects of edits.

    trace(model, "The capital of France is")            every layer at one position, with the most important memories
    intervene(model, prompt, "L3N51=0")                 traces before and after memories are set, scaled or silenced
    generate(model, prompt, 20, "L3N51=0")              a continuation with edited memories
    silence_each, integrate, in_common                  the memories on which a prediction depends
    ValueChange, trying, side_effects, save_changed     changes to values

`model` is a loaded model, anything that load() accepts, or an index. If it is an index, its model is loaded, and
memories are shown with their triggers and patterns.
"""
