"""A language model seen as memories.

    model = memlens.models.load("gpt2")
    model.layers[3].values            # [memories, d]
    with model.watch(use): model.run_body(tokens)

Importing this package is cheap: torch and transformers come in with the first model. It knows nothing of corpora.
"""
