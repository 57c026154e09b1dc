"""A language model seen as key-value memories.

model = memlens.load("gpt2")
model.layers[3].values            # [memories, d]
with model.watch(use): model.run_body(tokens)

load           names, folders and files to a MemoryModel
memory_model   MemoryModel; groups its layers of memories; hooks watch and edit coefficients; experts runs experts
discover       finds keys, values, norms and scales (blocks, match, find_lens); huggingface runs what was found
refusals       what a configuration alone speaks against
fairseq        the paper's checkpoint: network, files and words
lens           states and values to scores over the vocabulary
decompose      a logit as a sum of parts
proof          the check at load time; info describes a model
tokenizer      texts to tokens and back
"""
