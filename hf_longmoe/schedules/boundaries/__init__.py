"""Selective checkpoint offload (SCO): inputs of checkpointed layers wait for backward in host memory."""
