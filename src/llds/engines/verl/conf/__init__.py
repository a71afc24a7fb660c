"""Configuration groups for hydra: ``hydra.searchpath=[pkg://llds.engines.verl.conf] +llds@_global_=default``."""
