"""The operators: each module defines its torch ops (schema, reference, fake kernel) and its public functions."""

from . import adam as adam
from . import quant as quant
