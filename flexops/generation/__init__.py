"""Generation at the speed of memory: a cache of static shape, and one CUDA graph per token.

:class:`.cache.KVCache` keeps keys and values in tensors that never move, with the number of tokens
on the device. :mod:`.step` computes one decode step with them, and captures it; :mod:`.generate`
is ``flexops.generate``, whose step also samples (:mod:`.sampling`) or tries several tokens
(:mod:`.lookup`). :mod:`.model` runs in transformers' own ``generate``, with prompts
(:mod:`.prompt`) and steps (:mod:`.replay`) by graphs, :mod:`.paged` in its ``generate_batch``;
linear layers of a step are :mod:`.products`, and :mod:`.sources` finds which classes' attention can
be in one.
"""
