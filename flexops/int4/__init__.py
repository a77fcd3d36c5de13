"""Weights of 4 bits in models: the formats of checkpoints (:mod:`.formats`, :mod:`.mxfp4`),
layers that are converted or quantized (:mod:`.layers`), and ``from_pretrained`` and
``save_pretrained`` (:mod:`.checkpoints`). The products are :func:`flexops.int4_linear`'s.
"""
