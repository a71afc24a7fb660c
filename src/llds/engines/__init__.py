"""One file per engine; each only translates that engine's tensors, config and metrics."""
