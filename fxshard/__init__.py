"""fxshard: sharded data-parallel training through torch.compile, with graphs that can be read."""
