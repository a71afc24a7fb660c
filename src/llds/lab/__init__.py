"""The collapse laboratory: a small, fast model organism of GRPO's death spiral, its remedies, and the evidence.

One idea per module: :mod:`world` is the task, :mod:`organism` the policy, :mod:`rollouts` lets it act,
:mod:`warm` gives it a start, :mod:`arms` are the remedies, :mod:`update` one optimizer step, :mod:`loop` one
run, :mod:`regimes` what is held fixed; :mod:`series` stores runs, :mod:`sweep` makes many; :mod:`analysis`
judges what is stored, :mod:`figures` and :mod:`report` show it.
"""
