"""What pictures there are, their labels, and how one is decoded."""

from caster.data.corruptions import CORRUPTIONS, corrupt
from caster.data.decode import UnreadablePicture
from caster.data.pictures import Pictures, open_pictures

__all__ = ["CORRUPTIONS", "Pictures", "UnreadablePicture", "corrupt", "open_pictures"]
