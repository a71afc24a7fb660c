"""LLDS for verl: the same objective inside any of verl's policy losses, no fork, no copied code.

After ``pip install "llds[verl]"`` two words on a working verl command are enough::

    hydra.searchpath=[pkg://llds.engines.verl.conf] +llds@_global_=default

One idea per module: :mod:`options` are the settings, :mod:`config` puts them into verl's configuration,
:mod:`plugin` registers the losses, :mod:`loss` translates one micro-batch, :mod:`metrics` what is logged,
:mod:`batch` reads what verl doesn't hand to a loss, :mod:`preflight` speaks in the console before Ray starts.
Importing this package alone does not import verl.
"""
