"""Events as bytes, in the shapes that engines publish."""

from kvflash._core import encode_batch, encode_cleared, encode_removed, encode_stored

__all__ = ["encode_batch", "encode_cleared", "encode_removed", "encode_stored"]
