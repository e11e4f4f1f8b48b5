"""BlockEvent: blocks of tokens that a manager has recorded or forgotten; see
`VTensorManager.watch_blocks`."""

from flexinfer._vtensor import BLOCK_TOKENS, BlockEvent, BlockEventKind

__all__ = ["BLOCK_TOKENS", "BlockEvent", "BlockEventKind"]
