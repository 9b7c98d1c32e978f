"""Every torch operator that runs, written down as expressions over the tensors that were there before."""
