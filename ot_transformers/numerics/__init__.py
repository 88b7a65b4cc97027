"""Raw numerics on tensors that trust their caller: streaming sums, Sinkhorn iterations, transport solvers."""
