"""DeepSpeed's ZeRO checkpoints, read from the files of all ranks: fp32 weights, buffers and the optimizer, whole."""
