"""``python -m llds.cli``, for launchers that want a module, as ``torchrun -m llds.cli train``."""

from llds.cli import main

main()
