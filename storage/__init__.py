"""Page stores: bytes only, no torch, no knowledge of the tree."""
