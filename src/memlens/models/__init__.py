"""Language models as key-value memories.

model = memlens.load("gpt2")
model.layers[3].values            # [memories, d]
with model.watch(use): model.run_body(tokens)

load           `load`: a Hub id, folder, file or object to a MemoryModel; gguf checks the head of .gguf files
memory_model   MemoryModel; groups defines its layers, hooks observe and edit coefficients, experts runs experts
huggingface    MemoryModels of transformers networks; fairseq the paper's own checkpoint
discover       finds keys, values, norms and scales of each block, with blocks (re-runs them) and match (finds keys)
proof          proves at load time that the proposed parts reproduce the network's computation
lens           states and values to scores over the vocabulary; decompose splits a logit into parts
tokenizer      texts to tokens and back; info describes a model; sparse_autoencoder wraps a layer as one
"""
