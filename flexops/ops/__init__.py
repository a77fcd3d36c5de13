"""The operators: each module defines its torch ops (schema, reference, fake kernel) and its public
functions."""

from . import activation as activation
from . import adagrad as adagrad
from . import adam as adam
from . import adam8bit as adam8bit
from . import attention as attention
from . import cross_entropy as cross_entropy
from . import fp8 as fp8
from . import gated_linear as gated_linear
from . import grad_norm as grad_norm
from . import lamb as lamb
from . import linear_cross_entropy as linear_cross_entropy
from . import lion as lion
from . import norm as norm
from . import norm_backward as norm_backward
from . import norm_quantized as norm_quantized
from . import quant as quant
from . import rope as rope
from . import scaled_dot_product_attention as scaled_dot_product_attention
from . import softmax as softmax
