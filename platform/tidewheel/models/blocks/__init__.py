"""The modules that families are made of: norms, attention, feed-forwards, the block and the embedding.

Suffixes of names give shapes: B rows, L positions, D model width, H query heads, K key heads, E head width.
"""

from tidewheel.models.blocks.attention import Attention as Attention
from tidewheel.models.blocks.attention import Sinks as Sinks
from tidewheel.models.blocks.block import Block as Block
from tidewheel.models.blocks.embedding import Embedding as Embedding
from tidewheel.models.blocks.feed_forward import GatedFeedForward as GatedFeedForward
from tidewheel.models.blocks.feed_forward import Mlp as Mlp
from tidewheel.models.blocks.feed_forward import SwiGLU as SwiGLU
from tidewheel.models.blocks.norms import LayerNorm as LayerNorm
from tidewheel.models.blocks.norms import RMSNorm as RMSNorm
from tidewheel.models.blocks.norms import WidthNorm as WidthNorm
from tidewheel.models.blocks.norms import ZeroCentredRMSNorm as ZeroCentredRMSNorm
