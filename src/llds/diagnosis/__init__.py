"""What happened to a run, told from the log it left.

One idea per module: :mod:`formats` read logs of any engine into a :class:`~llds.diagnosis.table.Table` of
canonical series, :mod:`vocabulary` says which key of which engine is which series, the detectors look for
evidence, and :mod:`diagnose` weighs it into a :class:`~llds.diagnosis.findings.Diagnosis`.
"""
