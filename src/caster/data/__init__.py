"""Pictures with their labels, and corruptions of them.

The published sets are in `caster.data.sets`, the orders and batches in `caster.data.streams`.
"""

from caster.data.corruptions import CORRUPTIONS, corrupt
from caster.data.decode import UnreadablePicture
from caster.data.pictures import Pictures, open_pictures

__all__ = ["CORRUPTIONS", "Pictures", "UnreadablePicture", "corrupt", "open_pictures"]
